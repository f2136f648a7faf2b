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
      families        raises for models that the backend cannot follow
    attention       the attention function, called by every layer; `ranks` runs it on rows that are split over
                    processes; `flashmask_hf/sparse/hf.py` has the functions of dynamic sparse attention
      late            the layer's mask, from the caller's vectors, the hook's columns or the layer's default
        keywords        uses, ignores or refuses the layer's keywords
        branches        raises for trees whose positions are not depths
        windows         sliding windows measured by position
        ranks           takes the vectors of the heads that this process computes
        mask_cache      shares one mask, and its plan, between layers and recomputations
        forward_records  counts the layers that receive the caller's vectors, and whether anything reads documents

`model_hooks` holds what hooks on models and checks of their calls share, and `documents` operations on position_ids
that several modules use. `patches` adapts transformers where its interfaces do not suffice, `register` makes the
implementations known to it. `packed/` has what trainers put on models: packed rows in a backbone, router logits without
padding, a shared prefill.
"""
