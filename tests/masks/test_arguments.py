"""Wrong arguments of mask constructors: the error names the argument and the way out."""

from __future__ import annotations

import pytest
import torch

from flashmask_hf import FlashMask, masks

KEEP, BUCKET = torch.ones(2, 4, 8, dtype=torch.bool), torch.zeros(2, 4, 8, dtype=torch.int64)
LATE = torch.full((1, 2, 5), 5)
LONGER = FlashMask(torch.full((1, 1, 8, 1), 9, dtype=torch.int32), causal=True)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: masks.causal(0), ValueError, r"kv_len must be at least 1, got 0"),
        (lambda: masks.causal(True), TypeError, r"kv_len must be an int, got True"),
        (lambda: masks.full(4, q_len=0), ValueError, r"q_len must be at least 1, got 0$"),
        (lambda: masks.sliding_window(4, 2, q_len=5), ValueError, r"q_len must be in 1\.\.4, got 5; .* last q_len"),
        (lambda: masks.causal_document([]), ValueError, r"documents is empty"),
        (lambda: masks.causal_document([[3], []]), ValueError, r"documents\[1\] is empty"),
        (lambda: masks.causal_document(5), TypeError, r"documents must be a list.* got int"),
        (lambda: masks.causal_document([3, 0]), ValueError, r"documents\[1\] must be at least 1, got 0; leave out"),
        (
            lambda: masks.causal_document([[3], [2, -1]]),
            ValueError,
            r"documents\[1\]\[1\] must be at least 1, got -1",
        ),
        (lambda: masks.causal_document([3, [2]]), TypeError, r"documents\[1\] must be an int, got \[2\]"),
        (lambda: masks.causal_document([[3], 2]), TypeError, r"documents\[1\] must be one too, got 2"),
        (
            lambda: masks.causal_document([3, 2], kv_len=4),
            ValueError,
            r"documents holds 5 tokens, more than kv_len = 4",
        ),
        (
            lambda: masks.document(torch.tensor([3.0])),
            TypeError,
            r"documents must be an integer tensor \[documents\] or \[B, documents\], got torch.float32",
        ),
        (
            lambda: masks.document(torch.tensor([[[3]]])),
            ValueError,
            r"documents must have shape .* got \[1, 1, 1\]",
        ),
        (
            lambda: masks.document(torch.tensor([[0, 3]])),
            ValueError,
            r"documents\[0\]\[0\] must be at least 1, got 0",
        ),
        (lambda: masks.document(torch.tensor([[3], [0]])), ValueError, r"documents\[1\] is empty"),
        (lambda: masks.document(torch.tensor([3, 0])), ValueError, r"documents\[1\] must be at least 1, got 0"),
        (lambda: masks.global_sliding_window(4, -1, 1), ValueError, r"n_global must be in 0\.\.4, got -1"),
        (
            lambda: masks.prefix_lm_document([[(0, 1)], [(0, 0)]]),
            ValueError,
            r"documents\[1\]\[0\]\[1\] must be at least 1",
        ),
        (
            lambda: masks.random_eviction(5, evict_from=LATE, heads=2),
            ValueError,
            r"evict_from leaves nothing to draw; leave out generator",
        ),
        (lambda: masks.qk_sparse(KEEP, KEEP[0]), ValueError, r"k_keep must have shape \[B, H, S\].* got \[4, 8\]"),
        (lambda: masks.share_question([(3, [])]), ValueError, r"documents\[0\] has no answer; .* tree\(\)"),
        (
            lambda: masks.share_question([(3, [1, 0])]),
            ValueError,
            r"documents\[0\]\[1\]\[1\] must be at least 1, got 0",
        ),
        (lambda: masks.share_question([3]), TypeError, r"documents\[0\] must be a tuple .*, got 3"),
        (lambda: masks.share_question([(3, 1)]), TypeError, r"documents\[0\] must be a tuple"),
        (
            lambda: masks.share_question([(3, [(1, [1])])]),
            TypeError,
            r"documents\[0\]\[1\]\[0\] has children; .* tree\(\)",
        ),
        (
            lambda: masks.tree([(3, [1, (2, [0])])]),
            ValueError,
            r"documents\[0\]\[1\]\[1\]\[1\]\[0\] must be at least 1",
        ),
        (lambda: masks.tree([(3, [1], [2])]), TypeError, r"documents\[0\] must be a length or a tuple"),
        (lambda: masks.tree([(3, [[1, [2]]])]), TypeError, r"documents\[0\]\[1\]\[0\] must be a length or a tuple"),
        (lambda: masks.tree([(3, ["1"])]), TypeError, r"documents\[0\]\[1\]\[0\] must be an int, got '1'"),
        (lambda: masks.blocks([3], [1]), TypeError, r"spans\[0\] must be a tuple \(start, end\), got 1"),
        (lambda: masks.blocks([3], [(0, 1, 2)]), TypeError, r"spans\[0\] must be a tuple .* got \(0, 1, 2\)"),
        (lambda: masks.blocks([3], [(0, 1.0)]), TypeError, r"spans\[0\]\[1\] must be an int, got 1\.0"),
        (lambda: masks.blocks([3], [(1, 1)]), ValueError, r"spans\[0\]\[1\] must be in 2\.\.3, got 1"),
        (
            lambda: masks.blocks([3], [(1, 3), (0, 1)]),
            ValueError,
            r"spans\[1\]\[0\] must be at least 3, got 0; .*order",
        ),
        (
            lambda: masks.blocks([3, 2], [(2, 4)]),
            ValueError,
            r"\[1\] must be in 3\.\.3, got 4; .* within its document$",
        ),
        (
            lambda: masks.blocks([3], [(3, 4)], kv_len=5),
            ValueError,
            r"spans\[0\] must lie in a document, .* ends at 3$",
        ),
        (lambda: masks.blocks([[3], [2, 1]], [[], [(1, 3)]]), ValueError, r"spans\[1\]\[0\]\[1\] must be in 2\.\.2"),
        (lambda: masks.blocks([[3], [2]], [(0, 2)]), ValueError, r"spans has 1 rows, but lengths has 2"),
        (lambda: masks.blocks([3], [[], []]), ValueError, r"spans has 2 rows, but lengths has 1"),
        (lambda: masks.block_causal([3], 0), ValueError, r"block_size must be at least 1, got 0; a block has"),
        (lambda: masks.block_diffusion([3], True), TypeError, r"block_size must be an int, got True"),
        (lambda: masks.block_diffusion([3], 2, 0), ValueError, r"copies must be at least 1, got 0; .* block_causal"),
        (lambda: masks.block_diffusion([3, 2], 2, 2, kv_len=14), ValueError, r"lengths holds 15 tokens, more than"),
        (lambda: masks.block_diffusion_order([[3], [2]], 2), ValueError, r"lengths must be of one packed row, got 2"),
        (
            lambda: masks.draft_blocks([3, 2], [3, 1], 2),
            ValueError,
            r"anchors\[1\] must be in 3\.\.4, got 1; .* sort them",
        ),
        (
            lambda: masks.draft_blocks([[3], [2]], [[1], [2]], 2),
            ValueError,
            r"anchors\[1\]\[0\] must be in 0\.\.1, got 2",
        ),
        (lambda: masks.draft_blocks([3], [-1], 2), ValueError, r"anchors\[0\] must be in 0\.\.2, got -1"),
        (lambda: masks.draft_blocks([3], [1.0], 2), TypeError, r"anchors\[0\] must be an int, got 1\.0"),
        (lambda: masks.draft_blocks([3], torch.ones(1), 2), TypeError, r"anchors must be an integer tensor \[N\] or"),
        (lambda: masks.draft_blocks([3], [[1], [2]], 2), ValueError, r"anchors has 2 rows, but lengths has 1"),
        (lambda: masks.draft_blocks([3], [], 2), ValueError, r"the number of draft tokens must be at least 1, got 0"),
        (lambda: masks.draft_blocks([3], [1], 0), ValueError, r"block_size must be at least 1, got 0"),
        (lambda: masks.draft_chains([3], [1], [0]), ValueError, r"depths\[0\] must be at least 1, got 0; a chain"),
        (lambda: masks.draft_chains([3], [1], [1.0]), TypeError, r"depths\[0\] must be an int, got 1\.0"),
        (lambda: masks.draft_chains([3], [1], [1, 1]), ValueError, r"depths has 2 chains, but anchors has 1; give"),
        (lambda: masks.draft_chains([3], [1], [[1], [1]]), ValueError, r"depths has 2 rows, but lengths has 1"),
        (lambda: masks.draft_chains([3], [1], [4], kv_len=6), ValueError, r"lengths holds 7 tokens, more than kv_len"),
        (lambda: masks.draft_chains_order([[3], [2]], [[], []], [[], []]), ValueError, r"of one packed row, got 2"),
        (lambda: masks.global_sliding_window(4, 5, 1), ValueError, r"n_global must be in 0\.\.4, got 5"),
        (lambda: masks.global_sliding_window(4, 1, 0), ValueError, r"window must be at least 1, got 0"),
        (lambda: masks.sliding_window(5, 2, causal="False"), TypeError, r"causal must be True or False, got 'False'"),
        (lambda: masks.padding([3], causal="False"), TypeError, r"causal must be True or False, got 'False'"),
        (lambda: masks.prefix_lm_causal(4, 5), ValueError, r"prefix must be in 0\.\.4, got 5"),
        (lambda: masks.prefix_lm_causal(4, []), ValueError, r"prefix is empty"),
        (lambda: masks.prefix_lm_document([(4, 3)]), ValueError, r"documents\[0\]\[0\] must be in 0\.\.3, got 4"),
        (lambda: masks.prefix_lm_document([3]), TypeError, r"documents\[0\] must be a tuple .*, got 3"),
        (lambda: masks.prefix_lm_document([(1, 2, 3)]), TypeError, r"documents\[0\] must be a tuple .* \(1, 2, 3\)"),
        (
            lambda: masks.padding([3, 5], kv_len=4),
            ValueError,
            r"lengths\[1\] holds 5 tokens, more than kv_len = 4",
        ),
        (lambda: masks.padding([0, 0]), ValueError, "the number of tokens in lengths must be at least 1, got 0"),
        (lambda: masks.padding(3), TypeError, r"lengths must be a list, or an int tensor or array \[B\], got int"),
        (
            lambda: masks.padding(torch.ones(1, 2).long()),
            ValueError,
            r"lengths must have shape \[B\] with no empty axis, got \[1, 2\]",
        ),
        (lambda: masks.padding([3], side="top"), ValueError, r'side must be "right" or "left", got \'top\''),
        (
            lambda: masks.random_eviction(5, evict_from=LATE.float()),
            TypeError,
            r"evict_from must be an integer tensor",
        ),
        (
            lambda: masks.random_eviction(5, evict_from=LATE[0]),
            ValueError,
            r"shape \[B, Hm, kv_len = 5\].* got \[2, 5\]",
        ),
        (
            lambda: masks.random_eviction(4, evict_from=LATE),
            ValueError,
            r"shape \[B, Hm, kv_len = 4\], got \[1, 2, 5\]",
        ),
        (
            lambda: masks.random_eviction(5, evict_from=LATE + 1),
            ValueError,
            r"evict_from\[0, 0, 0\] is 6.* in 1\.\.5 only",
        ),
        (
            lambda: masks.random_eviction(5, evict_from=LATE - 2),
            ValueError,
            r"evict_from\[0, 0, 3\] is 3.* in 4\.\.5 only",
        ),
        (
            lambda: masks.random_eviction(5, evict_from=LATE, generator=torch.Generator()),
            ValueError,
            r"evict_from leaves nothing to draw; leave out generator",
        ),
        (
            lambda: masks.random_eviction(5, generator=5),
            TypeError,
            r"generator must be a torch.Generator or None, got int",
        ),
        (lambda: masks.random_eviction(5, heads=0), ValueError, r"heads must be at least 1, got 0"),
        (
            lambda: masks.qk_sparse(KEEP.int(), KEEP),
            TypeError,
            r"q_keep must be a bool tensor \[B, H, S\], got torch.int32",
        ),
        (lambda: masks.qk_sparse(KEEP, KEEP[:1]), ValueError, r"k_keep has batch size 1, q_keep has 2"),
        (
            lambda: masks.qk_sparse(KEEP, KEEP[:, :3]),
            ValueError,
            r"q_keep has 4 heads, which is not a multiple of the 3 heads of k_keep",
        ),
        (lambda: masks.qk_sparse(KEEP, KEEP.to("meta")), ValueError, r"k_keep is on meta, but q_keep is on cpu"),
        (
            lambda: masks.hash_sparse(KEEP, BUCKET),
            TypeError,
            r"q_bucket must be an integer tensor .* got torch.bool",
        ),
        (
            lambda: masks.hash_sparse(BUCKET, BUCKET, exclude_self="False"),
            TypeError,
            r"exclude_self must be True or False, got 'False'",
        ),
        (
            lambda: masks.hash_sparse(BUCKET, BUCKET, mask=masks.sliding_window(8, 2, causal=False)),
            ValueError,
            r"mask must be causal with n = 1 bound, got causal=False, n = 2; .* windows of flashmask_hf.masks",
        ),
        (
            lambda: masks.qk_sparse(KEEP, KEEP, mask=masks.causal_document([3, 4])),
            ValueError,
            r"mask has 7 key columns, but k and v have 8 keys",
        ),
        (lambda: masks.qk_sparse(KEEP, KEEP, mask=LONGER), ValueError, r"must lie in 0\.\.q_len = 0\.\.8"),
        (lambda: masks.hash_sparse(BUCKET, BUCKET, mask=LONGER), ValueError, r"must lie in 0\.\.q_len = 0\.\.8"),
    ],
)
def test_errors_name_the_argument_and_the_way_out(build, error, message):
    with pytest.raises(error, match=message):
        build()
