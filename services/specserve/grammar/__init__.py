"""Output that is held to a language: what clients write becomes one grammar, and grammars match."""
