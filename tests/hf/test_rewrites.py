"""Text models with positions of three axes keep packed documents apart, however their positions are given."""

import pytest
import torch
from tools import model_zoo
from tools.model_pairs import assert_near, positions, tokens
from tools.tiny import assert_exact

from flashmask_hf import masks
from flashmask_hf.hf.call import Call, count_axes
from flashmask_hf.hf.families import source_of
from flashmask_hf.hf.rewrites import rewrite

PLACES = positions([4, 1, 6])
FAMILIES = ["cosmos3_edge_text", "ernie4_5_vl_moe_text", "glm4v_text", "paddleocr_vl_text", "qwen2_5_vl_text"]
FAMILIES += ["qwen2_vl_text", "qwen3_vl_text"]


def hidden(model, ids, **call):
    return model(input_ids=ids, use_cache=False, **call).last_hidden_state


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("axes", [(), (3,), (4,)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_are_kept_apart(family, axes):
    model, ids = model_zoo.build(family, "flashmask").double().eval(), tokens(1, 11).clamp(max=35)
    model.set_experts_implementation("eager")  # torch's grouped product takes no float64
    places = PLACES.expand(*axes, 1, 11)
    want = torch.cat([hidden(model, ids[:, a:b]) for a, b in ((0, 4), (4, 5), (5, 11))], 1)
    assert_exact([hidden(model, ids, position_ids=places)], [want])
    assert_exact([hidden(model, ids, position_ids=places, attention_mask=torch.ones(1, 11).long())], [want])
    padded = torch.nn.functional.pad(places, (2, 0)), torch.nn.functional.pad(ids, (2, 0), value=5)
    mask = (torch.arange(13) >= 2).long()[None]
    assert_exact([hidden(model, padded[1], position_ids=padded[0], attention_mask=mask)[:, 2:]], [want])
    vectors = masks.causal_document([4, 1, 6]).indices
    assert_exact([hidden(model, ids, position_ids=places, startend_row_indices=vectors)], [want])


@pytest.mark.parametrize("axes", [(), (3,)], ids=str)
def test_answers_are_numbered_from_their_question(axes):
    model, ids = model_zoo.build("qwen2_vl_text", "flashmask").eval(), tokens(1, 9).clamp(max=35)
    places = torch.tensor([[0, 1, 2, 3, 4, 3, 4, 5, 6]]).expand(*axes, 1, 9)
    vectors = masks.share_question([(3, [2, 4])]).indices
    got = hidden(model, ids, position_ids=places, startend_row_indices=vectors)
    assert_near(got[:, 5:], hidden(model, torch.cat([ids[:, :3], ids[:, 5:]], 1))[:, 3:])
    with pytest.raises(RuntimeError, match="position_ids do not branch"):
        hidden(model, ids, position_ids=torch.arange(9).expand(*axes, 1, 9), startend_row_indices=vectors)


@pytest.mark.parametrize("first", [0, 3])
def test_an_image_is_no_document(first):
    """Patches have positions by time, height and width, which do not count on from token to token."""
    patch = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]]) + first
    text = torch.arange(first).expand(3, -1), torch.arange(first + 2, first + 6).expand(3, -1)
    places = torch.cat([text[0], patch, text[1]], 1)[:, None]
    ids = tokens(1, places.shape[-1]).clamp(max=35)
    ours, eager = (model_zoo.build("qwen2_vl_text", name).eval() for name in ("flashmask", "eager"))
    ours.load_state_dict(eager.state_dict())
    assert_near(hidden(ours, ids, position_ids=places), hidden(eager, ids, position_ids=places))
    head = ours(input_ids=ids[:, :5], position_ids=places[..., :5], use_cache=True)
    rest = ours(input_ids=ids[:, 5:], position_ids=places[..., 5:], past_key_values=head.past_key_values)
    assert_near(rest.last_hidden_state, hidden(eager, ids, position_ids=places)[:, 5:])


def test_counts_start_again_where_all_axes_are_zero():
    places = torch.tensor([[[0, 1, 0, 0, 1]], [[0, 1, 0, 0, 1]], [[0, 1, 1, 0, 1]]])
    assert count_axes(places).tolist() == [[0, 1, 2, 0, 1]]
    assert count_axes(places[..., 1:3]).tolist() == [[1, 2]]
    assert count_axes(torch.zeros(3, 1, 3).long()).tolist() == [[1, 2, 3]]
    assert count_axes(torch.tensor([[0, 0, 0], [0, 1, 0]]).expand(3, 2, 3)).tolist() == [[1, 2, 3], [0, 1, 0]]


def test_positions_stay_as_they_are_under_another_attention():
    model = model_zoo.build("qwen2_vl_text", "sdpa")
    assert rewrite(Call(model, (), {"position_ids": PLACES})).named["position_ids"] is PLACES
    model.set_attn_implementation("flashmask")
    assert rewrite(Call(model, (), {"position_ids": PLACES})).named["position_ids"].shape == (4, 1, 11)


def test_a_forward_without_source_takes_no_text_positions():
    made = {}
    exec("def forward(self, position_ids): position_ids.shape[0] == 4", made)
    for forward in (made["forward"], print):
        assert source_of(forward) == ""


@pytest.mark.parametrize("axes", [(), (3,), (4,)], ids=str)
def test_recurrent_layers_raise(axes):
    model = model_zoo.build("qwen3_5_text", "flashmask")
    with pytest.raises(ValueError, match="carry tokens from one document into the next"):
        model(input_ids=tokens(1, 11).clamp(max=35), position_ids=PLACES.expand(*axes, 1, 11))
