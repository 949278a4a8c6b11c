"""The stages of linearising a model: data, attention transfer, the choice of layers, fine-tuning."""
