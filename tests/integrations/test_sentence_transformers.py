"""sentence-transformers on flat rows: embeddings, losses and gradients of padded batches under eager attention."""

import inspect

import pytest
import torch
from tools import wheels
from tools.tiny import VOCAB, word_tokenizer
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    Lfm2Config,
    ModernBertConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    RobertaConfig,
)

import flashmask_hf

library = pytest.importorskip("sentence_transformers")
from sentence_transformers.base.modules import Transformer  # noqa: E402
from sentence_transformers.cross_encoder.modules import LogitScore  # noqa: E402
from sentence_transformers.sentence_transformer.losses import (  # noqa: E402
    CachedMultipleNegativesRankingLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling  # noqa: E402

from flashmask_hf.integrations import sentence_transformers as integration  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("float64")]

BOUND = 1e-12
"""Largest error in float64, relative to the largest value."""


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "pad_token_id": 0, "initializer_range": 0.3, "max_position_embeddings": 64,
}  # fmt: skip
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOWS = {"local_attention": 4, "global_attn_every_n_layers": 3, "initializer_cutoff_factor": 2.0}
CONFIGS = {
    "bert": lambda: BertConfig(**SIZES, **NO_DROPOUT),
    "roberta": lambda: RobertaConfig(**SIZES, **NO_DROPOUT, type_vocab_size=1),
    "modernbert": lambda: ModernBertConfig(**SIZES, **SPECIAL, **WINDOWS),
    "qwen3": lambda: Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8),
    "qwen3moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, num_key_value_heads=2, head_dim=8),
    "lfm2": lambda: Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"]),
}
LOSSES = {
    "mnrl": MultipleNegativesRankingLoss,
    "cached": lambda model: CachedMultipleNegativesRankingLoss(model, mini_batch_size=3),
    "cached-tokens": lambda model: CachedMultipleNegativesRankingLoss(model, mini_batch_num_tokens=20),
    "matryoshka": lambda model: MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), [32, 16, 8]),
    "matryoshka-cached": lambda model: MatryoshkaLoss(
        model, CachedMultipleNegativesRankingLoss(model, mini_batch_size=4), [32, 16, 8]
    ),
}


def words(count, most, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, most, (count,), generator=generator).tolist()
    return [" ".join(f"w{i}" for i in torch.randint(8, VOCAB, (n,), generator=generator).tolist()) for n in lengths]


def saved(config, folder, kind=AutoModel, **template):
    torch.manual_seed(0)
    kind.from_config(config).save_pretrained(folder)
    word_tokenizer(**template).save_pretrained(folder)
    return str(folder)


def embedder(folder, pooling, attention, **options):
    body = Transformer(folder, model_kwargs={"attn_implementation": attention}, **options)
    if "moe" in body.config.model_type:
        body.model.set_experts_implementation("eager")  # torch's grouped product takes no float64
    modules = [body, Pooling(body.config.hidden_size, pooling_mode=pooling)]
    return library.SentenceTransformer(modules=modules, device="cpu").double()


def assert_near(got, want):
    assert (got - want).abs().max() <= BOUND * want.abs().max()


def check_embedder(folder, pooling, losses, texts, **options):
    """Check embeddings, losses and gradients."""
    flat, padded = (embedder(folder, pooling, attention, **options) for attention in ("flashmask", "eager"))
    integration.unpad_inputs(flat)
    assert "cu_seq_lens_q" in flat.preprocess(texts)
    assert flat.preprocess(texts)["input_ids"].numel() == padded.preprocess(texts)["attention_mask"].sum()
    encoded = [model.encode(texts, batch_size=7, convert_to_tensor=True) for model in (flat, padded)]
    assert_near(*encoded)
    half = len(texts) // 2
    for name in losses:
        found = []
        for model in (flat.train(), padded.train()):
            model.zero_grad()
            loss = LOSSES[name](model)(
                [model.preprocess(part) for part in (texts[:half], texts[half : 2 * half])], None
            )
            loss.backward()
            gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            assert len(gradients) >= 20
            found.append((loss.detach(), torch.cat(gradients)))
        for got, want in zip(*found, strict=True):
            assert_near(got, want)


@pytest.mark.parametrize(
    ("family", "pooling", "losses"),
    [
        ("bert", "cls", ["mnrl", "matryoshka"]),
        ("roberta", "weightedmean", ["cached-tokens"]),
        ("modernbert", "max", ["cached"]),
        ("qwen3", "lasttoken", list(LOSSES)),
        ("qwen3", "mean", ["mnrl"]),
        ("qwen3moe", "lasttoken", ["mnrl"]),
    ],
)
def test_flat_rows_equal_padded_batches(family, pooling, losses, tmp_path):
    check_embedder(saved(CONFIGS[family](), tmp_path), pooling, losses, words(20, 12, 0))


def test_minilm_embeds_and_learns_the_same(tmp_path):
    """Real weights, on 200 docstrings of one sentence each."""
    texts = {inspect.getdoc(x).split("\n")[0] for x in vars(torch.Tensor).values() if inspect.getdoc(x)}
    texts |= {inspect.getdoc(x).split("\n")[0] for x in vars(torch).values() if callable(x) and inspect.getdoc(x)}
    folder, losses = str(wheels.minilm(tmp_path)), ["mnrl", "cached-tokens", "matryoshka-cached"]
    check_embedder(folder, "mean", [], sorted(texts)[:200], config_kwargs=NO_DROPOUT)
    check_embedder(folder, "mean", losses, sorted(texts)[:24], config_kwargs=NO_DROPOUT)


def test_cached_losses_draw_the_same_dropout_again(tmp_path):
    """They embed each mini-batch twice: without gradients, and with them in the backward."""
    config = CONFIGS["bert"]()
    config.attention_probs_dropout_prob = 0.3
    model, seen = embedder(saved(config, tmp_path), "mean", "flashmask").train(), []
    integration.unpad_inputs(model)
    model.register_forward_hook(lambda _, __, output: seen.append(output["sentence_embedding"].detach()))
    columns = [model.preprocess(words(10, 12, seed)) for seed in (0, 1)]
    LOSSES["cached"](model)(columns, None).backward()
    LOSSES["mnrl"](model)(columns, None)
    first, again, other = torch.cat(seen[:8]), torch.cat(seen[8:16]), torch.cat(seen[16:])
    assert torch.equal(first, again)
    assert (first - other).abs().max() > 0.01


def test_what_cannot_be_flat_is_refused(tmp_path, monkeypatch):
    folder = saved(CONFIGS["bert"](), tmp_path / "bert")
    with pytest.raises(ValueError, match=r"attn_implementation='flashmask', got \['eager'\]; load"):
        integration.unpad_inputs(embedder(folder, "mean", "eager"))
    reranker = library.CrossEncoder(folder, model_kwargs={"attn_implementation": "flashmask"}, device="cpu")
    with pytest.raises(ValueError, match="BertForSequenceClassification takes no flat rows"):
        integration.unpad_inputs(reranker)
    mixed = embedder(saved(CONFIGS["lfm2"](), tmp_path / "lfm2"), "mean", "flashmask").train()
    with pytest.raises(ValueError, match="document"):
        integration.unpad_inputs(mixed)
    assert mixed[0].training
    assert not mixed[0].can_flatten_inputs

    model = embedder(folder, "mean", "flashmask")
    layer, forward = model[0].model.encoder, type(model[0].model.encoder).forward
    layer.forward = lambda *args, cu_seq_lens_q=None, **kwargs: forward(layer, *args, **kwargs)
    with pytest.raises(ValueError, match="BertModel does not keep the texts of a flat row apart"):
        integration.unpad_inputs(model)
    monkeypatch.delattr(Transformer, "_is_flash_attention_requested")
    with pytest.raises(RuntimeError, match=rf"sentence-transformers {library.__version__} flattens"):
        integration.unpad_inputs(model)


def test_a_query_and_16_documents_have_the_scores_of_16_rows(tmp_path):
    template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}w3"
    folder = saved(CONFIGS["qwen3"](), tmp_path, AutoModelForCausalLM, chat_template=template)
    (query,), documents = words(1, 2, 1), words(16, 12, 2)
    query = " ".join([query] * 20)

    def reranker(attention):
        body = Transformer(
            folder, transformer_task="text-generation", model_kwargs={"attn_implementation": attention},
        )  # fmt: skip
        return library.CrossEncoder(modules=[body, LogitScore(5, 6)], device="cpu").double()

    shared, alone = reranker("flashmask"), reranker("eager")
    flashmask_hf.share_prefixes(shared[0].model)
    counts = []
    shared[0].model.model.embed_tokens.register_forward_hook(lambda _, args, __: counts.append(args[0].numel()))
    pairs = [(query, x) for x in documents]
    found = [
        model.predict(pairs, batch_size=size, convert_to_tensor=True, activation_fn=None)
        for model, size in ((shared, 16), (alone, 1))
    ]
    assert max(counts) <= 20 + sum(len(x.split()) + 1 for x in documents)
    assert_near(*found)
