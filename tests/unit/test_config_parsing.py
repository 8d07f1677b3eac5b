"""From text to configuration: what is accepted, and what a wrong word is answered."""

import pytest

from specserve.config import EngineConfig, ServerConfig, SpeculativeConfig
from specserve.config_parsing import build, did_you_mean, field_docs, parse_speculative_config
from specserve.errors import ConfigurationError


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
        ('{"method": "ngrams"}', "method: found 'ngrams', wanted 'draft_model' or 'ngram'"),
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


@pytest.mark.parametrize("method", ["suffix", "eagle", "eagle3", "mtp", "medusa"])
def test_methods_not_there_yet_are_refused_by_name(method):
    """A method of the field that is missing is no typing error, and is told so."""
    with pytest.raises(ConfigurationError) as caught:
        parse_speculative_config(f'{{"method": "{method}", "model": "x"}}')

    assert f"method '{method}' is not supported yet; supported: draft_model, ngram" in str(
        caught.value
    )


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
