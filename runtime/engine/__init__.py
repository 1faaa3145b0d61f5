"""A small engine on top of the runtime: Llama checkpoints, a paged KV cache, greedy decoding of one batch at a time."""
