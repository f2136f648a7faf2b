"""The hook that leaves padding out of the router logits of packed rows."""

import torch
from tools.model_pairs import SIZES, positions, tokens
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from flashmask_hf.hf.packed.router_logits import drop_padding_from_router_logits


def test_router_logits_of_packed_rows_lack_their_padding():
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flashmask")
    drop_padding_from_router_logits(model)
    drop_padding_from_router_logits(model)  # drops it only once
    row = {"input_ids": tokens(1, 6), "position_ids": positions([2, 3, 1]), "output_router_logits": True}
    vectors = torch.tensor([[2, 2, 5, 5, 5, 0]], dtype=torch.int32)[:, None, :, None]

    def rows(**given):
        return [len(logits) for logits in model.base_model(**row | given, use_cache=False)["router_logits"]]

    assert rows(startend_row_indices=vectors) == [5, 5]
    assert rows() == [6, 6]
    assert rows(startend_row_indices=vectors, attention_mask=torch.ones(1, 6)) == [6, 6]
    assert rows(startend_row_indices=vectors, packed_index=torch.zeros(2, 4, dtype=torch.int64)) == [6, 6]
    kept = model.base_model(**row | {"output_router_logits": False}, startend_row_indices=vectors)
    assert kept.get("router_logits") is None
    assert isinstance(model.base_model(**row, startend_row_indices=vectors, return_dict=False), tuple)
