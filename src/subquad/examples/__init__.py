"""Programs to run and to read: a mechanism in your own model, in a pretrained one, and a comparison on your own text.

python -m subquad.examples.own_model eva window=16 chunk_size=4
python -m subquad.examples.swap_vit performer features=32
python -m subquad.examples.compare_text my.txt --mixers softmax,lightconv,eva

The notebooks beside them go step by step: which_mechanism.ipynb, own_model.ipynb and linearise.ipynb.
"""
