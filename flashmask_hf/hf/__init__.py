"""Everything that imports transformers: all behind `attn_implementation="flashmask"`.

A model call passes through the modules in this order:

    patches         makes one `Call` of the arguments (`call`, with its `documents`), and runs:
      rewrites        changes of arguments
      checks/         checks that raise, before the call or after it; `rules` selects what can apply
    mask_hook       transformers asks once per kind of layers: a mask function, joined with the call's documents or
                    mask indices, as marked integer rows
      mask_reader     reads the function as intervals, by symbolic tracing
      merge, windows  join mask indices with padding, and with windows measured by position
    attention       the function that every layer calls; `keywords` checks its keywords, `ranks` runs it on shards
      layer_mask      reads marked rows, and keeps masks for later layers
      late            makes the mask of a layer whose mask the hook did not merge, as in static caches, modules called
                      by hand, image and audio encoders, and context parallelism

`families` and `models` describe models of transformers, and `packed/` serves trainers.
"""
