"""Other programs of docs/programs.md compute with "flashmask" what they compute with eager attention."""

import pytest
import torch
from tools.tiny import llama_config, word_tokenizer
from transformers import AutoModelForCausalLM, BertConfig, BertModel

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]

TEXTS = ["w5 w6 w7", "w9", "w8 w5 w6 w7 w9 w10 w11 w12"]


@pytest.fixture
def encoder(tmp_path):
    sizes = {name: getattr(llama_config(), name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    torch.manual_seed(0)
    config = BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3)
    BertModel(config).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


def sentence_transformer(path, attention):
    library = pytest.importorskip("sentence_transformers")
    dropout = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    options = {"model_kwargs": {"attn_implementation": attention}, "config_kwargs": dropout, "device": "cpu"}
    return library.SentenceTransformer(path, **options)


def attention_of(model):
    return model[0].auto_model.config._attn_implementation


def test_sentence_transformers_encode_and_learn_the_same(encoder):
    embeddings, gradients = [], []
    for attention in ("flashmask", "eager"):
        model = sentence_transformer(encoder, attention)
        assert attention_of(model) == attention
        embeddings.append(torch.from_numpy(model.encode(TEXTS)))
        features = model.train().preprocess(TEXTS)
        model(features)["sentence_embedding"].square().cumsum(0).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*embeddings)
    assert len(gradients[0]) > 20
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_attention_dropout_of_sentence_transformers_says_what_to_set(encoder):
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(encoder, model_kwargs={"attn_implementation": "flashmask"}, device="cpu")
    with pytest.raises(ValueError, match="attention_probs_dropout_prob=0"):
        model.train()(model.preprocess(TEXTS))


def test_setfit_takes_a_body_and_drops_model_kwargs(encoder):
    """The first is what the page says; if the second no longer holds, the page may say less."""
    setfit = pytest.importorskip("setfit")
    linear_model = pytest.importorskip("sklearn.linear_model")
    body = sentence_transformer(encoder, "flashmask")
    model = setfit.SetFitModel(model_body=body, model_head=linear_model.LogisticRegression())
    model.fit(TEXTS, [0, 1, 0], num_epochs=1)
    assert attention_of(model.model_body) == "flashmask"
    assert len(model.predict(TEXTS)) == 3
    loaded = setfit.SetFitModel.from_pretrained(encoder, model_kwargs={"attn_implementation": "flashmask"})
    assert attention_of(loaded.model_body) == "sdpa"


def test_lm_eval_scores_the_same(tmp_path):
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    instances = pytest.importorskip("lm_eval.api.instance")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(llama_config(initializer_range=0.3)).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    requests = [
        instances.Instance("loglikelihood", {}, (context, " w20 w21"), number) for number, context in enumerate(TEXTS)
    ]
    scores = []
    for attention in ("flashmask", "eager"):
        model = huggingface.HFLM(str(tmp_path), attn_implementation=attention, device="cpu", batch_size=3)
        assert model.model.config._attn_implementation == attention
        scores.append(torch.tensor([score for score, _ in model.loglikelihood(requests)]))
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)
    assert len(set(scores[0].tolist())) == 3
