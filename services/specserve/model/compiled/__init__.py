"""The Llama family's forward compiled for this processor: bfloat16 on x86 with AVX512-BF16."""
