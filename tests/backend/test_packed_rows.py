"""The check that every layer receives the packed rows' mask; the trainers' tests run models on packed rows."""

import pytest
from tools.model_pairs import model_pair, positions, tokens

from flashmask_hf import masks
from flashmask_hf.backend.packed_rows import check_layers
from flashmask_hf.backend.supplied_calls import SuppliedCalls, _active

ROW = dict(position_ids=positions([2, 4]), startend_row_indices=masks.causal_document([2, 4]).indices, use_cache=False)


def test_every_counter_counts_the_layers_that_receive_the_vectors():
    model, _ = model_pair("llama")
    with SuppliedCalls() as outer:
        model(tokens(1, 6), **ROW)
        with SuppliedCalls() as inner:
            model(tokens(1, 6), **ROW)
        model(tokens(1, 6))
    model(tokens(1, 6), **ROW)
    assert (outer.count, inner.count) == (4, 2)


@pytest.mark.parametrize("where", ["a layer", "a hook before", "a hook after"])
def test_a_forward_that_raises_leaves_no_counter(where):
    model, _ = model_pair("llama")
    backbone = model.base_model

    def interrupt(*_):
        raise RuntimeError("interrupted")

    register = {
        "a layer": backbone.layers[1].register_forward_pre_hook,
        "a hook before": backbone.register_forward_pre_hook,
        "a hook after": backbone.register_forward_hook,
    }[where]
    check_layers(model)
    handle = register(interrupt, prepend=where == "a hook after")  # between the hooks that count
    with pytest.raises(RuntimeError, match="interrupted"):
        model(tokens(1, 6), **ROW)
    assert _active.get() == ()
    assert not hasattr(backbone, "_supplied_calls")
    handle.remove()
    model(tokens(1, 6), **ROW)
    assert backbone._layers_checked
