"""From text to configuration: what is accepted, and what a wrong word is answered."""

import pytest

from specserve.config import EngineConfig, ServerConfig, SpeculativeConfig
from specserve.config_parsing import build, did_you_mean, field_docs, parse_speculative_config
from specserve.errors import ConfigurationError
from specserve.serve_args import ServeArgs


def test_keys_of_the_field_are_understood():
    """The keys that users already type give the values they mean."""
    config = parse_speculative_config(
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}'
    )

    assert config == SpeculativeConfig(
        method="ngram", num_speculative_tokens=3, prompt_lookup_max=5
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"num_spec_tokens": 3}', "did you mean 'num_speculative_tokens'?"),
        ('{"modle": "x"}', "did you mean 'model'?"),
        (
            '{"method": "ngrams"}',
            "wanted 'draft_model', 'ngram', 'suffix' or 'cascade'; did you mean 'ngram'?",
        ),
        ('{"sufix_decoding_max_spec_factor": 2}', "did you mean 'suffix_decoding_max_spec_factor'"),
        ('{"suffix_decoding_max_tree_depth": 1}', "max_tree_depth: found 1, wanted greater"),
        ('{"suffix_decoding_max_spec_factor": 0}', "max_spec_factor: found 0, wanted greater"),
        ('{"suffix_decoding_min_token_prob": 1.5}', "min_token_prob: found 1.5, wanted less"),
        ('{"suffix_decoding_max_cached_requests": -1}', "cached_requests: found -1, wanted"),
        (
            '{"method": "cascade", "cascade_min_match_length": 24}',
            "cascade_min_match_length 24 is above 23",
        ),
        ('{"num_speculative_tokens": -1}', "num_speculative_tokens: found -1, wanted greater"),
        ('{"num_speculative_tokens": 65}', "num_speculative_tokens: found 65, wanted less"),
        ('{"num_speculative_tokens": "many"}', "num_speculative_tokens: found 'many', wanted"),
        ('{"prompt_lookup_min": 5}', "prompt_lookup_min 5 is above prompt_lookup_max 4"),
        ('{"use_heterogeneous_vocab": true}', "'use_heterogeneous_vocab' is not supported yet"),
        ("[1]", "wanted a JSON object"),
        ("{method: ngram}", "not JSON"),
        ("", "not JSON"),
    ],
)
def test_a_wrong_config_is_refused_by_name(text, message):
    """Every refusal says which key, what was found and what was wanted."""
    with pytest.raises(ConfigurationError) as caught:
        parse_speculative_config(text)

    assert message in str(caught.value)
    assert str(caught.value).startswith("--speculative-config: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"num_speculative_tokens": true}', "num_speculative_tokens: found true, wanted a valid"),
        ('{"num_speculative_tokens": "4"}', "num_speculative_tokens: found '4', wanted a valid"),
        ('{"num_speculative_tokens": 4.0}', "num_speculative_tokens: found 4.0, wanted a valid"),
        ('{"num_speculative_tokens": null}', "num_speculative_tokens: found null, wanted a valid"),
        ('{"draft_vocab_size": true}', "draft_vocab_size: found true, wanted a valid"),
        ('{"max_model_len": "64"}', "max_model_len: found '64', wanted a valid"),
        ('{"suffix_decoding_max_spec_factor": true}', "spec_factor: found true, wanted a valid"),
        ('{"suffix_decoding_max_spec_factor": "2"}', "spec_factor: found '2', wanted a valid"),
        ('{"model": 5}', "model: found 5, wanted a valid string"),
        ('{"method": true}', "method: found true, wanted"),
    ],
)
def test_a_value_of_another_type_is_no_value_of_this_one(text, message):
    """JSON has types: true is not 1, and "4" is not 4."""
    with pytest.raises(ConfigurationError) as caught:
        parse_speculative_config(text)

    assert message in str(caught.value)


def test_types_are_as_strict_in_a_serve_config():
    """The same keys in the `args` of a Serve config file, which has types too."""
    for value in (True, "4"):
        with pytest.raises(ValueError, match="num_speculative_tokens"):
            ServeArgs.model_validate(
                {
                    "target": {"model": "toy:"},
                    "speculative": {"model": "toy:", "num_speculative_tokens": value},
                }
            )
    args = ServeArgs.model_validate(
        {"target": {"model": "toy:"}, "orchestrator": {"target_addresses": ["127.0.0.1:1"]}}
    )

    assert args.orchestrator.target_addresses == ("127.0.0.1:1",)


@pytest.mark.parametrize("text", ["[%s]", '{"%s": 1}', '{"method": "%s"}', '{"model": [%s]}'])
def test_a_long_value_is_not_repeated(text):
    """However long a key or a value, its beginning names it."""
    long = "1" * 5000
    with pytest.raises(ConfigurationError) as caught:
        parse_speculative_config(text.replace("%s", long))

    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "medusa"])
def test_methods_not_there_yet_are_refused_by_name(method):
    """A method of the field that is missing is no typing error, and is told so."""
    with pytest.raises(ConfigurationError) as caught:
        parse_speculative_config(f'{{"method": "{method}", "model": "x"}}')

    assert f"method '{method}' is not supported yet; supported: draft_model, ngram, suffix" in str(
        caught.value
    )


def test_suffix_decodings_keys_are_those_of_vllm():
    """Their names and defaults; what is kept of past outputs is off unless asked for."""
    config = parse_speculative_config(
        '{"method": "suffix", "suffix_decoding_max_spec_factor": 2, "num_speculative_tokens": 16}'
    )

    assert config.suffix_decoding_max_tree_depth == 24
    assert config.suffix_decoding_max_spec_factor == 2.0
    assert config.suffix_decoding_min_token_prob == 0.1
    assert config.suffix_decoding_max_cached_requests == 0


@pytest.mark.parametrize(
    ("method", "num_speculative_tokens", "offered"),
    [
        ("draft_model", 4, ("draft_model", "ngram", "suffix", "cascade")),
        ("cascade", 4, ("draft_model", "ngram", "suffix", "cascade")),
        ("ngram", 4, ("ngram", "suffix")),
        ("suffix", 4, ("ngram", "suffix")),
        ("draft_model", 0, ()),
    ],
)
def test_a_request_may_choose_what_needs_no_more_services(method, num_speculative_tokens, offered):
    """A draft model is offered only where a draft service runs; nothing is with K = 0."""
    config = SpeculativeConfig(method=method, num_speculative_tokens=num_speculative_tokens)

    assert config.methods == offered


def test_all_complaints_come_at_once():
    """Two mistakes are told together, spelt as the user typed them."""
    with pytest.raises(ConfigurationError) as caught:
        build(ServerConfig, {"port": "99999", "lease_s": 0}, spell=lambda name: f"--{name}")

    assert "--port: found '99999', wanted" in str(caught.value)
    assert "--lease_s: found 0, wanted greater than 0" in str(caught.value)


def test_a_missing_field_is_named():
    """A field without a default is missing, not None."""
    with pytest.raises(ConfigurationError, match="^model: missing$"):
        build(EngineConfig, {})


def test_every_field_of_the_engine_has_help_but_the_choices_that_speak_for_themselves():
    """Help texts come from under the fields: a field without one shows up here."""
    docs = field_docs(EngineConfig)

    assert set(EngineConfig.model_fields) == set(docs)
    assert docs["block_size"] == "Tokens per KV block."


def test_nothing_near_is_not_guessed():
    """A word that resembles no known one gets no suggestion."""
    assert did_you_mean("zzz", ["model", "method"]) == ""
