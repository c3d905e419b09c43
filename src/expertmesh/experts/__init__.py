"""The expert layer: what happens inside `experts(hidden_states, top_k_index, top_k_weights)`.

layer.py tells the story (dispatch, MLP, combine); dispatch.py and deepep.py move tokens between ranks; expert_mlp.py is
the grouped MLP with the lean backward; pairs.py sums pairs into rows. Nothing here knows about model families.
"""
