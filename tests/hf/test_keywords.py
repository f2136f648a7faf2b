"""Keywords of attention: used, harmless, refused or, if unknown, ignored with one warning."""

import pytest
import torch
from tools.model_pairs import SIZES, attend, model_pair, tokens
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2MoeConfig

from flashmask_hf import masks
from flashmask_hf.hf import keywords


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_that_hides_every_key_is_refused(window):
    refused = pytest.raises(ValueError, match=f"^sliding_window must be at least 1, got {window}, .*set it to None")
    with refused:
        attend(sliding_window=window)
    model, _ = model_pair("mistral", num_hidden_layers=1, sliding_window=window)
    with refused:
        model(tokens(1, 6))
    with refused:
        model(tokens(1, 6), startend_row_indices=masks.causal(6).indices)
    model, _ = model_pair("mistral", num_hidden_layers=1, sliding_window=None)
    model(tokens(1, 6))


def test_a_window_that_changes_after_a_valid_call_is_refused_too():
    model, _ = model_pair("gemma2")
    vectors = masks.causal(6).indices
    model(tokens(1, 6), startend_row_indices=vectors)
    model.model.layers[0].self_attn.sliding_window = 0
    with pytest.raises(ValueError, match="sliding_window must be at least 1, got 0"):
        model(tokens(1, 6), startend_row_indices=vectors)


def test_a_window_that_a_model_leaves_to_its_mask_is_refused_too():
    options = dict(SIZES, use_sliding_window=True, max_window_layers=0, num_experts=2, num_experts_per_tok=1)
    config = Qwen2MoeConfig(**options, sliding_window=0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask")
    with pytest.raises(ValueError, match="sliding_window must be at least 1, got 0"):
        model(tokens(1, 6))


@pytest.mark.parametrize("name", sorted(x for x in keywords._ERRORS if "weights" not in x))
def test_keyword_that_changes_the_result_is_refused(name):
    # Layers get a paged cache itself before transformers 5.24, and its indices since.
    paged = name in ("cache", "read_index")
    way_out = "use attn_implementation='sdpa' for continuous batching" if paged else f"pass {name}=None, or use attn"
    with pytest.raises(NotImplementedError, match=rf"^{name} changes the result of attention .*; {way_out}"):
        attend(**{name: torch.zeros(1)})
    attend(**{name: None})


@pytest.mark.parametrize(
    ("attention", "name", "owner"),
    [
        ("flashmask", "flashmask_hash", "flashmask_hash"),
        ("flashmask", "q_keep", "flashmask_qk"),
        ("flashmask_qk", "flashmask_hash", "flashmask_hash"),
        ("flashmask_hash", "flashmask_qk", "flashmask_qk"),
    ],
)
def test_options_of_another_implementation_are_refused(attention, name, owner):
    model, _ = model_pair("llama", num_hidden_layers=1)
    model.config.flashmask_hash = {"n_buckets": 2} if attention == "flashmask_hash" else None
    model.set_attn_implementation(attention)
    with pytest.raises(NotImplementedError, match=f"^{name} is an option .*set_attn_implementation..{owner}"):
        model(tokens(1, 5), **{name: {}})
    model(tokens(1, 5))


def test_unknown_keyword_warns_once():
    plain, _ = attend()
    with pytest.warns(UserWarning, match="ignores the attention keyword 'temperature'.*use 'eager'") as caught:
        warned, _ = attend(temperature=2.0)
    assert caught[0].filename == attend.__code__.co_filename  # the code that called attention
    attend(temperature=2.0)  # a second warning would be an error
    assert torch.equal(plain, warned)
    attend(temperature=None, num_items_in_batch=3, shift_labels=torch.zeros(2, 6), output_attentions=False)


def test_unknown_keyword_is_compiled_without_a_warning(no_compiled_code):
    """Code that looks for the names that were warned of would be compiled anew after each warning."""
    graphs, call = CompileCounter(), ({"temperature": torch.ones(2)}, "flashmask")
    run = torch.compile(lambda x: (keywords.check_keywords(*call), x + 1)[1], backend=graphs, fullgraph=True)
    run(torch.ones(2))
    keywords._warned.add("another")
    run(torch.ones(2))
    assert graphs.frame_count == 1


@pytest.mark.parametrize(
    "name", ["startend_row_indicies", "start_end_row_indices", "startend_rows", "attn_mask_startend_row_indices"]
)
def test_misspelt_vectors_are_refused(name):
    model, _ = model_pair("llama", num_hidden_layers=1)
    given = {name: masks.causal_document([2, 4]).indices}
    with pytest.raises(TypeError, match=rf"keyword '{name}'.*do you mean startend_row_indices\?"):
        model(tokens(1, 6), **given)
    attend(**{name: None})


def test_misspelt_vectors_are_refused_while_compiling(no_compiled_code):
    model, _ = model_pair("llama", num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="do you mean startend_row_indices"):
        compiled(tokens(1, 6), startend_rows=masks.causal_document([2, 4]).indices)


def test_no_attention_weights():
    assert attend()[1] is None
    with pytest.raises(NotImplementedError, match=r"output_attentions=True: .*use attn_implementation='eager'"):
        attend(output_attentions=True)


def test_no_attention_weights_of_a_model_that_collects_them():
    """GPT-2 does not hand output_attentions to its layers: hooks keep what they return."""
    config = GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask").eval()
    model(tokens(1, 6))  # whose keywords are the same
    with pytest.raises(NotImplementedError, match=r"output_attentions=True: .*use attn_implementation='eager'"):
        model(tokens(1, 6), output_attentions=True)
    assert len(model(tokens(1, 6), output_hidden_states=True).hidden_states) == 3
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert len(compiled(tokens(1, 6), output_hidden_states=True).hidden_states) == 3
        with pytest.raises(torch._dynamo.exc.Unsupported, match="output_attentions=True"):
            compiled(tokens(1, 6), output_attentions=True)
