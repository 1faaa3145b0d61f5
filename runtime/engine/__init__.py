"""A small engine on top of the runtime: a paged KV cache, continuous batching, sampling and streaming."""
