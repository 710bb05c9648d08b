"""How a model is being run: in a trace or an export, without views, in half precision."""
