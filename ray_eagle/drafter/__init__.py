"""The EAGLE-3 drafter: the module, its checkpoint formats and how a new one starts.

Tensor names carry their shape, everywhere in this project:
B documents, T tokens, N positions that count, H hidden size of the target, C = 3H (three aux hidden states), V target
vocabulary, D draft vocabulary, K unroll steps, A attention heads, G key/value heads, E head dim.
Layer ids are always "output of layer L", 0-based.
"""
