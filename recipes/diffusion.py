r"""Training of a diffusion language model on packed documents, with attn_implementation="flashmask".

Every flag of TRL's `SFTConfig`, `ModelConfig`, `ScriptArguments` and `DatasetMixtureConfig` works, also in a YAML file:

    accelerate launch --quiet recipes/diffusion.py                   # the demo: configs/diffusion_demo.yaml
    accelerate launch --quiet recipes/diffusion.py --config recipes/configs/diffusion.yaml

A causal model of transformers learns block diffusion (BD3LM): `PackedDiffusionTrainer` noises the completions, or all
tokens of plain text. `--block_size 0` trains whole documents (LLaDA). Examples, rows and logs are as in `sft.py`; in
block diffusion a row has `copies` + 1 times `max_length` tokens. `--show` fills in masked tokens after training.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import data
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

from flashmask_hf import masks
from flashmask_hf.collators import DataCollatorForBlockDiffusion, DataCollatorForMaskedDiffusion
from flashmask_hf.names import IGNORED
from flashmask_hf.trainers import PackedDiffusionTrainer

DEMO_CONFIG = common.CONFIGS / "diffusion_demo.yaml"
MASK = "<|mask|>"


@dataclass
class RecipeArguments(common.ShowArguments):
    """Flags of this recipe beyond TRL's."""

    block_size: int = common.flag(default=32, help="Tokens per block; 0 trains whole documents.")
    copies: int = common.flag(default=1, help="Noisy copies of each document.")
    complementary: bool = common.flag(
        default=False, help="Noise in every second copy the tokens that the one before leaves."
    )
    noise_per: str = common.flag(default="document", help="What has one noise level: a document or a block.")
    loss_weight: str = common.flag(default="1/t", help="Weight of a noised token: 1/t, of noise level t, or uniform.")


def main(argv: Sequence[str]) -> None:
    flags = parse(argv)
    build_model = partial(data.build_model, mask_token=MASK)
    options = common.trainer_options(flags, data.facts, build_model)
    tokenizer = load_tokenizer(options["model"], flags.training)
    collator = make_collator(flags.own, tokenizer.mask_token_id)
    trainer = common.build(PackedDiffusionTrainer, **options, data_collator=collator, processing_class=tokenizer)
    common.train(trainer, flags.script)
    if flags.own.show and trainer.accelerator.is_main_process:
        show(trainer, flags.own)


def parse(argv: Sequence[str]) -> common.Flags:
    return common.parse(argv, DEMO_CONFIG, RecipeArguments, SFTConfig, truncation_mode=None)


def load_tokenizer(model: str, args: Any) -> Any:
    """Load a tokenizer with a mask token; raise a FlagError if the model has no embedding for it."""
    options = {"trust_remote_code": args.trust_remote_code, "revision": (args.model_init_kwargs or {}).get("revision")}
    tokenizer: Any = AutoTokenizer.from_pretrained(model, **options)
    if tokenizer.mask_token is None:
        tokenizer.add_special_tokens({"mask_token": MASK})
    embeddings = AutoConfig.from_pretrained(model, **options).get_text_config().vocab_size
    if tokenizer.mask_token_id >= embeddings:
        raise common.FlagError(
            f"model_name_or_path: {model} has {embeddings} embeddings and none for {tokenizer.mask_token}, token "
            f"{tokenizer.mask_token_id}; add it to model and tokenizer (resize_token_embeddings), and save both"
        )
    return tokenizer


def make_collator(flags: RecipeArguments, mask_token_id: int) -> DataCollatorForMaskedDiffusion:
    weight: Any = flags.loss_weight
    blocks: Any = {"copies": flags.copies, "complementary": flags.complementary, "per": flags.noise_per}
    try:
        if not flags.block_size:
            if blocks != {"copies": 1, "complementary": False, "per": "document"}:
                raise common.FlagError(
                    "--copies, --complementary and --noise_per need blocks; set --block_size, say 32"
                )
            return DataCollatorForMaskedDiffusion(mask_token_id=mask_token_id, weight=weight)
        size = flags.block_size
        return DataCollatorForBlockDiffusion(mask_token_id=mask_token_id, weight=weight, block_size=size, **blocks)
    except ValueError as error:
        raise common.FlagError(str(error)) from None


def show(trainer: Any, flags: RecipeArguments) -> None:
    args, tokenizer = trainer.args, trainer.processing_class
    model = common.load_for_inference(AutoModelForCausalLM, str(args.output_dir), args)
    right = total = 0
    for ids, labels in itertools.islice(documents(trainer.eval_dataset), flags.show):
        clean = torch.tensor(ids, device=model.device)
        learned = (torch.tensor(labels, device=model.device) != IGNORED).nonzero()[:, 0]
        masked = clean.index_fill(0, learned[::2], tokenizer.mask_token_id)
        filled = fill(model, masked, tokenizer.mask_token_id, flags.block_size or len(ids))
        print(f"Masked: {tokenizer.decode(masked)}\nFilled: {tokenizer.decode(filled, skip_special_tokens=True)}")
        right += int((filled == clean)[learned[::2]].sum())
        total += len(learned[::2])
    print(f"{right} of {total} masked tokens are as written")


def documents(dataset: Any) -> Iterator[tuple[list[int], list[int]]]:
    for row in dataset:
        yield from zip(row["input_ids"][:-1], row.get("labels", row["input_ids"])[:-1], strict=True)


@torch.no_grad()
def fill(model: Any, ids: Tensor, mask_token_id: int, block_size: int) -> Tensor:
    """Replace the mask tokens of a document, int64 [n], block by block, the likeliest first."""
    ids = ids.clone()
    for end in [*range(block_size, len(ids), block_size), len(ids)]:
        indices = masks.block_causal([end], block_size, device=ids.device).bidirectional().indices
        while (places := (ids[:end] == mask_token_id).nonzero()[:, 0]).numel():
            logits = model(ids[None, :end], startend_row_indices=indices, use_cache=False).logits[0, places]
            logits[:, mask_token_id] = -torch.inf
            probability, token = logits.softmax(-1).max(-1)
            ids[places[probability.argmax()]] = token[probability.argmax()]
    return ids


if __name__ == "__main__":
    common.run(main)
