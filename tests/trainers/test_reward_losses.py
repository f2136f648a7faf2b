"""Losses of reward models equal their definitions, with any number of answers and with ties."""

import itertools
import math

import numpy as np
import pytest
import torch
from tools.rewards import CLOSE, DEFINITIONS, defined_centering, load, make, pairs_of, scored, separate_rewards
from tools.tiny import EXACT, FLOAT32, TRAINER_WARNINGS, assert_same_gradients, gradients_of, one_step

from flashmask_hf.trainers import MultiAnswerRewardTrainer
from flashmask_hf.trainers.reward_losses import pairwise_loss, plackett_luce_loss

pytestmark = [*TRAINER_WARNINGS, pytest.mark.usefixtures("float64")]


def random_questions(count, seed, levels):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(6, count, generator=generator, dtype=torch.float64)
    scores = torch.randint(0, levels, (6, count), generator=generator).float()
    scores[:, 0], scores[:, 1] = 0, levels  # never all equal
    return rewards, scores, scores[:, :, None] > scores[:, None]


def test_listwise_is_the_plackett_luce_model():
    """Over all rankings of four answers the likelihoods sum to one, and each is the product of its choices."""
    rewards = torch.randn(1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = 0.0
    for order in itertools.permutations(range(4)):
        scores = torch.empty(1, 4)
        scores[0, list(order)] = torch.tensor([3.0, 2.0, 1.0, 0.0])
        likelihood = plackett_luce_loss(rewards, scores[:, :, None] > scores[:, None]).neg().exp()
        chances = [
            math.exp(rewards[0, order[k]]) / sum(math.exp(rewards[0, i]) for i in order[k:]) for k in range(len(order))
        ]
        assert likelihood.item() == pytest.approx(math.prod(chances), rel=EXACT)
        total += likelihood.item()
    assert total == pytest.approx(1.0, rel=EXACT)


@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize("loss_type", DEFINITIONS)
def test_ties_do_not_count(loss_type, count):
    rewards, scores, beats = random_questions(count, seed=count, levels=3)
    loss = {"pairwise": pairwise_loss, "listwise": plackett_luce_loss}[loss_type]
    expected = torch.stack([DEFINITIONS[loss_type](*pair) for pair in zip(rewards, scores.tolist(), strict=True)])
    torch.testing.assert_close(loss(rewards, beats), expected, **CLOSE)
    if count == 2:
        torch.testing.assert_close(plackett_luce_loss(rewards, beats), pairwise_loss(rewards, beats), **CLOSE)


@pytest.mark.parametrize("option", [{}, {"center_rewards_coefficient": 0.3}, {"score_margin": 0.5}], ids=str)
@pytest.mark.parametrize("loss_type", DEFINITIONS)
def test_different_numbers_of_answers_equal_separate_forwards(loss_type, option, model_path, tokenizer, tmp_path):
    low = 0.0 if "score_margin" in option else 200.0  # scores may be less than the one that pads
    data = [example | {"scores": [score - low for score in example["scores"]]} for example in scored()]
    trainer = make(
        MultiAnswerRewardTrainer, model_path, tokenizer, tmp_path, data, loss_type=loss_type,
        per_device_train_batch_size=len(data), **option,
    )  # fmt: skip
    loss, gradients, metrics = one_step(trainer)

    model = load(model_path, "eager").train()
    rewards = [separate_rewards(model, example) for example in data]
    expected = 0.0
    for example, own in zip(data, rewards, strict=True):
        expected += DEFINITIONS[loss_type](own, example["scores"], option.get("score_margin", 0.0)) / len(data)
        center = option.get("center_rewards_coefficient", 0.0)
        expected += center * defined_centering(own, example["scores"]) / len(data)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), **CLOSE)
    assert_same_gradients(gradients, gradients_of(model))

    every = torch.cat(rewards)
    tokens = sum(len(e["prompt_ids"]) + len(a) for e in data for a in e["answers_ids"])
    ahead = [
        np.mean([(own[i] - own[j]).item() for i, j in pairs_of(example["scores"])])
        for example, own in zip(data, rewards, strict=True)
    ]
    right = [
        np.mean([own[i] > own[j] for i, j in pairs_of(example["scores"])])
        for example, own in zip(data, rewards, strict=True)
    ]
    computed = sum(len(e["prompt_ids"]) + sum(map(len, e["answers_ids"])) for e in data)
    assert {name: x for name, x in metrics.items() if not name.startswith("accuracy_of_")} == pytest.approx(
        {
            "num_tokens": tokens,
            "min_reward": every.min().item(),
            "mean_reward": every.mean().item(),
            "max_reward": every.max().item(),
            "accuracy": np.mean(right),
            "margin": np.mean(ahead),
            "mask_sparsity": 0.0,  # a short row is one tile
            "shared_tokens_saved": 1 - computed / tokens,
        },
        rel=EXACT,
        abs=FLOAT32,  # accuracies are float32
    )
