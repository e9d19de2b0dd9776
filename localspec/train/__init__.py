"""Making training data out of a model's own answers. Run by hand; nothing here is loaded when a model is used."""
