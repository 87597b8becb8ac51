"""Small models, each of which some compiler has got wrong. A module has

case()   -> (model, args, kwargs): what is compiled, and the first call; the same at each call
more()   -> [(args, kwargs), ...]: further calls of the same compiled object (optional)

and says in its docstring what must hold; tests/test_cases.py checks it.
"""
