"""Other programs of docs/programs.md compute with "flashmask" what they compute with eager attention, or refuse it.

The programs are no dependencies of this package: tests of programs that are not installed are skipped.
"""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tools.tiny import EXACT, assert_exact, gradients_of, llama_config, word_tokenizer
from transformers import AutoModelForCausalLM, BertConfig, BertModel

import flashmask_hf
from flashmask_hf import integrations
from flashmask_hf.sharing import _pack

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]

TEXTS = ["w5 w6 w7", "w9", "w8 w5 w6 w7 w9 w10 w11 w12"]
PAGE = (Path(__file__).parents[1] / "docs" / "programs.md").read_text()
DOCUMENTS = [torch.arange(5, 25), torch.arange(30, 39), torch.arange(12, 43)]
POSITIONS = [torch.arange(len(document)) for document in DOCUMENTS]


def script(word):
    """Return the code of the page that contains a word."""
    return next(code for code in re.findall(r"```py(?:thon)?\n(.*?)```", PAGE, re.DOTALL) if word in code)


def module(name):
    """Return a module of a program, which some versions of its dependencies break; skip without it."""
    return pytest.importorskip(name, exc_type=ImportError)


def assert_as_alone(logits, model):
    """Assert that the logits [1, S, V] of the packed documents are the logits of each alone."""
    alone = [model(input_ids=document[None], use_cache=False).logits for document in DOCUMENTS]
    assert_exact([logits[:, : sum(map(len, DOCUMENTS))]], [torch.cat(alone, 1)])


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
    return library.SentenceTransformer(path, **options).double()


def attention_of(model):
    return model[0].auto_model.config._attn_implementation


@pytest.mark.usefixtures("float64")
def test_sentence_transformers_encode_and_learn_the_same(encoder):
    embeddings, gradients = [], []
    for attention in ("flashmask", "eager"):
        model = sentence_transformer(encoder, attention)
        assert attention_of(model) == attention
        embeddings.append([torch.from_numpy(model.encode(TEXTS))])
        features = model.train().preprocess(TEXTS)
        model(features)["sentence_embedding"].square().cumsum(0).sum().backward()
        gradients.append(list(gradients_of(model).values()))
    assert_exact(*embeddings)
    assert len(gradients[0]) > 20
    assert_exact(*gradients)


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


@pytest.fixture
def causal(tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(llama_config(initializer_range=0.3)).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.usefixtures("float64")
def test_rerankers_share_the_query(causal):
    """Scores and gradients of one query's documents."""
    library, modules = pytest.importorskip("sentence_transformers"), module("sentence_transformers.base.modules")
    logit_score = module("sentence_transformers.cross_encoder.modules").LogitScore
    pairs = [("w10 w11 w12 w13 w14 w15 w16", text) for text in (*TEXTS, *TEXTS)]
    scores, gradients = [], []
    _pack.cache_clear()
    for attention in ("flashmask", "eager"):
        options = {"attn_implementation": attention}
        part = modules.Transformer(causal, transformer_task="text-generation", model_kwargs=options)
        reranker = library.CrossEncoder(modules=[part, logit_score(20, 21)], device="cpu").double()
        if attention == "flashmask":
            flashmask_hf.share_prefixes(reranker[0].model)
        scores.append([torch.from_numpy(reranker.predict(pairs))])
        reranker.train()(reranker.preprocess(pairs))["scores"].square().sum().backward()
        gradients.append([p.grad for p in reranker.parameters()])
    assert _pack.cache_info().misses
    assert_exact(*scores)
    assert_exact(*gradients)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("share", [False, True])
def test_lm_eval_scores_the_same(causal, share):
    """Shared are the contexts of multiple choices."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    instances = pytest.importorskip("lm_eval.api.instance")
    choices = [" w20 w21", " w22", " w20 w23 w24"]
    requests = [
        instances.Instance("loglikelihood", {}, (context, choice), number)
        for number, context in enumerate(TEXTS)
        for choice in choices
    ]
    scores = []
    _pack.cache_clear()
    for attention in ("flashmask", "eager"):
        model = huggingface.HFLM(causal, attn_implementation=attention, device="cpu", batch_size=9, dtype="float64")
        assert model.model.config._attn_implementation == attention
        if share and attention == "flashmask":
            flashmask_hf.share_prefixes(model.model)
        scores.append([score for score, _ in model.loglikelihood(requests)])
    assert bool(_pack.cache_info().misses) == share
    assert scores[0] == pytest.approx(scores[1], rel=EXACT)
    assert len(set(scores[0])) == len(requests)


def test_torchtitan_packs_documents(monkeypatch):
    attention, llama3 = module("torchtitan.models.common.attention"), module("torchtitan.models.llama3")
    for owner, name in ((attention.VarlenAttention, "forward"), (llama3.Llama3Model, "get_attention_masks")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back what the script replaces
    exec(script("torchtitan"), {})
    torch.manual_seed(0)
    model = llama3.llama3_configs["debugmodel"](attn_backend="varlen").build()
    model.init_states()

    def logits(tokens, positions):
        return model(tokens[None], positions[None], model.get_attention_masks(positions[None]))

    packed = logits(torch.cat(DOCUMENTS), torch.cat(POSITIONS))
    torch.testing.assert_close(packed, torch.cat([*map(logits, DOCUMENTS, POSITIONS)], 1), rtol=1e-4, atol=1e-5)


def test_axolotl_takes_the_plugin_and_packs_with_it(monkeypatch):
    config, base = module("axolotl.utils.schemas.config"), module("axolotl.integrations.base")
    for name in ("CANONICAL_ATTN_IMPLS", "ATTN_IMPLS_SUPPORTING_PACKING"):  # put back what the plugin adds to
        monkeypatch.setattr(config, name, getattr(config, name))
    validate = config.AxolotlInputConfig.validate_attn_implementation
    with pytest.raises(ValueError, match="not a recognized backend"):
        validate("flashmask")
    manager, name = base.PluginManager.get_instance(), "flashmask_hf.integrations.axolotl.FlashMaskPlugin"
    monkeypatch.setattr(manager, "plugins", type(manager.plugins)())
    manager.register(name, required=True)
    plugin = manager.plugins[name]
    plugin.register({"attn_implementation": "flashmask", "context_parallel_size": 1})
    options = {"base_model": "x", "attn_implementation": "flashmask", "sample_packing": True, "sequence_len": 64}
    options |= {"datasets": [{"path": "x", "type": "alpaca"}], "micro_batch_size": 1, "learning_rate": 1e-4}
    options |= {"gradient_accumulation_steps": 1, "bf16": False, "flashmask_share_prefixes": True}
    parsed = module("axolotl.integrations.config").merge_input_args()[1](**options)
    assert parsed.attn_supports_packing
    assert parsed.flashmask_share_prefixes
    with pytest.raises(ValueError, match="context_parallel_size must be 1 with attention 'flashmask', got 2"):
        plugin.register({"attn_implementation": "flashmask", "context_parallel_size": 2})


def train(tmp_path, command, rows, settings):
    """Train with a program's own command on the CPU: three steps of four rows; return what it prints."""
    data, config = tmp_path / "rows.jsonl", tmp_path / "settings.json"
    data.write_text("\n".join(map(json.dumps, rows)))
    settings |= {"max_steps": 3, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", "seed": 1}
    config.write_text(json.dumps(settings))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    command = [sys.executable, "-m", *command, config]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def test_ms_swift_trains_the_same_without_padding(causal, tmp_path):
    """DPO with shared prefixes, against padded eager attention."""
    pytest.importorskip("swift.cli.main")
    plugin = f"{integrations.__path__[0]}/ms_swift/flashmask_plugin.py"
    share = {"flashmask_share_prefixes": 1}
    ours = {"attn_impl": "flashmask", "padding_free": True, "external_plugins": plugin, "model_kwargs": share}
    question, answers = {"role": "user", "content": "w9"}, [{"role": "assistant", "content": x} for x in TEXTS * 4]
    rows = [{"messages": [question, answer], "rejected_response": "w10 w11"} for answer in answers]
    steps = []
    for options in (ours, {"attn_impl": "eager"}):
        settings = {"model": causal, "model_type": "llama", "template": "dummy", "torch_dtype": "float32"}
        settings |= {"dataset": f"{tmp_path}/rows.jsonl", "rlhf_type": "dpo", "tuner_type": "full", "report_to": "none"}
        settings |= {"output_dir": f"{tmp_path}/{options['attn_impl']}", "add_version": False, "split_dataset_ratio": 0}
        train(tmp_path, ["swift.cli.main", "rlhf"], rows, settings | {"per_device_train_batch_size": 4} | options)
        lines = Path(settings["output_dir"], "logging.jsonl").read_text().splitlines()
        logged = [row for row in map(json.loads, lines) if "grad_norm" in row]
        steps.append(torch.tensor([[row["loss"], row["grad_norm"]] for row in logged]))
    assert len(steps[0]) == 3
    torch.testing.assert_close(*steps, rtol=1e-4, atol=1e-5)


def test_axolotl_trains_the_same_on_packed_rows(causal, tmp_path):
    """Against its own packing with SDPA."""
    pytest.importorskip("axolotl")
    rows = [{"instruction": text, "input": "", "output": f"{text} w20"} for text in TEXTS * 16]
    steps = []
    for attention in ("flashmask", "sdpa"):
        settings = {"base_model": causal, "datasets": [{"path": f"{tmp_path}/rows.jsonl", "type": "alpaca"}]}
        settings |= {"attn_implementation": attention, "sample_packing": True, "sequence_len": 128, "bf16": False}
        settings |= {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "optimizer": "adamw_torch"}
        settings |= {"multipack_real_batches": True}  # as its SDPA, which packs other rows into a batch without it
        settings |= {"output_dir": f"{tmp_path}/{attention}", "dataset_prepared_path": f"{tmp_path}/{attention}-data"}
        if attention == "flashmask":
            settings["plugins"] = ["flashmask_hf.integrations.axolotl.FlashMaskPlugin"]
        printed = train(tmp_path, ["axolotl.cli.train"], rows, settings | {"dataset_num_proc": 1, "val_set_size": 0})
        logged = re.findall(r"'loss': '([^']+)', 'grad_norm': '([^']+)'", printed)
        steps.append(torch.tensor([list(map(float, row)) for row in logged]))
    assert len(steps[0]) == 3
    torch.testing.assert_close(*steps, rtol=2e-3, atol=0)  # axolotl prints four digits


@pytest.mark.usefixtures("float64")
def test_llama_factory_packs_documents(monkeypatch):
    """The batch of `neat_packing: true`, from its own collator."""
    patcher, collator = module("llamafactory.model.patcher"), module("llamafactory.data.collator")
    monkeypatch.setattr(patcher, "configure_attn_implementation", patcher.configure_attn_implementation)
    monkeypatch.setattr(collator, "prepare_4d_attention_mask", collator.prepare_4d_attention_mask)
    exec(script("llamafactory").replace("main()", ""), {})
    config = llama_config(initializer_range=0.3)
    patcher.configure_attn_implementation(config, SimpleNamespace(flash_attn="auto"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double()
    assert model.config._attn_implementation == "flashmask"
    numbers = [torch.full_like(positions, number) for number, positions in enumerate(POSITIONS, start=1)]
    columns = {"input_ids": DOCUMENTS, "labels": DOCUMENTS, "position_ids": POSITIONS, "attention_mask": numbers}
    padding = {"labels": -100}
    row = {name: torch.cat(column).tolist() + [padding.get(name, 0)] * 3 for name, column in columns.items()}
    template = module("llamafactory.data.template").TEMPLATES["empty"]
    collate = collator.SFTDataCollatorWith4DAttentionMask(word_tokenizer(), template=template, block_diag_attn=True)
    assert_as_alone(model(**collate([row]), use_cache=False).logits, model)


def test_ms_swift_takes_the_name_and_packing_with_the_plugin(monkeypatch):
    attention, arguments = module("swift.model.utils").AttnImpl, module("swift.arguments").SftArguments
    ranks = module("swift.sequence_parallel.sequence_parallel").sequence_parallel
    for name in ("_check_padding_free", "get_model_processor"):  # put back what the plugin replaces
        monkeypatch.setattr(arguments, name, getattr(arguments, name))
    config = llama_config()
    attention.update_attn_impl(config, "flashmask")
    assert config._attn_implementation == "flashmask"
    given = dict(packing=True, padding_free=False, attn_impl="flashmask", sequence_parallel_size=1)
    with pytest.raises(ValueError, match='"packing" feature requires a flash attention implementation'):
        arguments._check_padding_free(SimpleNamespace(**given))
    module("swift.utils.utils").import_external_file(integrations.__path__[0] + "/ms_swift/flashmask_plugin.py")
    found = SimpleNamespace(**given)
    arguments._check_padding_free(found)
    assert found.padding_free
    assert found.attn_impl == "flashmask"
    with pytest.raises(ValueError, match="sequence_parallel_size must be 1"):
        arguments._check_padding_free(SimpleNamespace(**given | {"sequence_parallel_size": 2}))
    model = AutoModelForCausalLM.from_config(config)
    model(DOCUMENTS[0][None])
    monkeypatch.setattr(ranks, "world_size", 2)
    with pytest.raises(ValueError, match="ms-swift splits rows over ranks"):
        model(DOCUMENTS[0][None])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("share", [False, True])
def test_verl_packs_documents(tmp_path, monkeypatch, share):
    """The row of its FSDP engine, whose mesh is of CPUs here."""
    monkey_patch = module("verl.models.transformers.monkey_patch")
    engines, configs = module("verl.workers.engine.fsdp.transformer_impl"), module("verl.workers.config")
    tensordict, settings = module("tensordict"), module("verl.utils.tensordict_utils")
    monkeypatch.setattr(monkey_patch, "is_trl_available", lambda: False)  # it takes an older one for granted
    stock = monkey_patch.apply_monkey_patch
    monkeypatch.setattr(monkey_patch, "apply_monkey_patch", getattr(stock, "__wrapped__", stock))
    monkeypatch.delitem(sys.modules, "flashmask_hf.integrations.verl", raising=False)
    importlib.import_module("flashmask_hf.integrations.verl")  # as `import verl` does, before its engines
    monkeypatch.setattr(engines, "apply_monkey_patch", monkey_patch.apply_monkey_patch)
    AutoModelForCausalLM.from_config(llama_config(initializer_range=0.3)).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    mesh = torch.distributed.device_mesh.init_device_mesh
    monkeypatch.setattr(engines, "create_device_mesh", lambda **_: mesh("cpu", (1,)))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        options = {"attn_implementation": "flashmask", "flashmask_share_prefixes": share}
        model_config = configs.HFModelConfig(path=str(tmp_path), override_config=options)
        engine_config = configs.FSDPEngineConfig(use_torch_compile=False, model_dtype="fp32")
        engine = engines.FSDPEngineWithLMHead(model_config, engine_config, None, None)
        engine.module = engine._build_module().double().eval()
    finally:
        torch.distributed.destroy_process_group()
    assert engine.module.config._attn_implementation == "flashmask"
    assert "flashmask" not in engine.module.config.to_json_string()  # which verl saves with each checkpoint
    documents = [*DOCUMENTS, DOCUMENTS[0], torch.cat([DOCUMENTS[0], DOCUMENTS[1]])]
    columns = {"input_ids": documents, "position_ids": [torch.arange(len(x)) for x in documents]}
    columns["loss_mask"] = columns["position_ids"]
    rows = {name: torch.nested.as_nested_tensor(column, layout=torch.jagged) for name, column in columns.items()}
    batch = tensordict.TensorDict(rows, batch_size=[len(documents)])
    settings.assign_non_tensor(batch, temperature=1.0, use_remove_padding=True, use_fused_kernels=False)
    inputs, _ = engine.prepare_model_inputs(batch)
    assert inputs["attention_mask"] is None
    _pack.cache_clear()
    logits = engine.module(**inputs, use_cache=False).logits
    assert _pack.cache_info().misses == share
    assert_as_alone(logits, engine.module)
    alone = engine.module(input_ids=documents[4][None], use_cache=False).logits
    assert_exact([logits[:, -len(documents[4]) :]], [alone])
    monkeypatch.setattr(module("verl.utils.ulysses"), "get_ulysses_sequence_parallel_world_size", lambda: 2)
    with pytest.raises(ValueError, match="verl splits rows over ranks"):
        engine.module(**inputs, use_cache=False)
