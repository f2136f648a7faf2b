"""The transformers backend: everything behind `attn_implementation="flashmask"`.

A forward passes through the modules in this order:

    ignored_vectors  raises if the model's attention is another one, which would ignore the caller's vectors
    unread_documents  raises if the model reads nowhere what tells the documents of a row
    mixed_documents  raises for documents that a part of the model beside the attention would mix
    position_axes   adds the row that separates documents to positions of several axes
    document_guard  keeps the documents of packed rows apart in layers that are not attention, or raises
    position_numbers  counts packed rows from the first position of models that embed positions
    mask_hook       transformers asks once per mask type: int32 columns from a `mask_function` and a 2D attention_mask
      mask_reader     reads the function as intervals, by symbolic tracing
      model_support   raises for models that the backend cannot follow
    forward         the attention function, called by every layer; `parts` runs it on rows that are split over
                    processes; `flashmask_hf/sparse/hf.py` has the functions of dynamic sparse attention
      layer_mask      the layer's mask, from the caller's vectors, the hook's columns or the layer's default
        keywords        uses, ignores or refuses the layer's keywords
        branches        raises for trees whose positions are not depths
        windows         sliding windows measured by position
        tensor_parallel  takes the vectors of the heads that this process computes
        mask_cache      shares one mask, and its plan, between layers and recomputations
        forward_records  counts the layers that receive the caller's vectors, and whether anything reads documents

`model_hooks` holds what hooks on models and checks of their calls share, and `positions` operations on position_ids
that several modules use. `patches` adapts transformers where its interfaces do not suffice, `register` makes the
implementations known to it, and `packed_rows` runs a model's backbone on packed rows for the trainers. `router_logits`
leaves padding out of the auxiliary loss of a mixture of experts, `tree_packing` reads the packed tries of TRL's
AsyncGRPO, and `shared_prefill` makes `generate` compute repeated prompts once, with any attention.
"""
