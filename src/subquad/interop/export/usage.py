"""Programs for the card of an export: each runs in the export's folder, without subquad, as it stands there."""

from collections.abc import Sequence

from subquad.interop.export.graphs import Part

OPEN = {
    "onnx": 'onnxruntime.InferenceSession("{name}.onnx")',
    "torch": 'torch.export.load("{name}.pt2").module()',
}
IMPORTS = {"onnx": "import numpy as np\nimport onnxruntime\n", "torch": "import torch\n"}

TEXT = {
    "onnx": """model = {open}
tokens = np.array([[{tokens}]])  # {what}
(logits,) = model.run(None, {{"tokens": tokens, "padding": np.zeros(tokens.shape, bool)}})
print(logits.argmax(-1))
""",
    "torch": """model = {open}
tokens = torch.tensor([[{tokens}]])  # {what}
(logits,) = model(tokens, torch.zeros(tokens.shape, dtype=torch.bool))
print(logits.argmax(-1))
""",
}

IMAGES = {
    "onnx": """model = {open}
images = np.zeros((1, {shape}), np.float32)  # scaled as inputs.json says
(logits,) = model.run(None, {{"images": images}})
print(logits.argmax(-1))
""",
    "torch": """model = {open}
images = torch.zeros(1, {shape})  # scaled as inputs.json says
(logits,) = model(images)
print(logits.argmax(-1))
""",
}

ENCODER = {
    "onnx": """encoder = {open}
source = np.array([[4, 5, {end}]])  # numbers of the tokenizer's symbols, the end among them
names = [one["name"] for one in parts["encoder"]["outputs"]]
found = encoder.run(names, {{"source": source, "padding": np.zeros(source.shape, bool)}})
memory = dict(zip(names, found))
""",
    "torch": """encoder = {open}
source = torch.tensor([[4, 5, {end}]])  # numbers of the tokenizer's symbols, the end among them
memory = encoder(source, torch.zeros(source.shape, dtype=torch.bool))
""",
}

STEPS = {
    "onnx": """step = {open}
sizes = {{"batch": 1, "past": 0, "chunks": 20}}
state = {{
    one["name"]: np.full([sizes.get(axis, axis) for axis in one["shape"]], one["start"], one["dtype"])
    for one in parts["step"]["inputs"]
    if "start" in one
}}
text = [{begin}]  # {what}
for place in range(20):
    logits, *after = step.run(None, {{"token": np.array([text[place]]), **state, **memory}})
    state = dict(zip(state, after))
    if place == len(text) - 1:  # all is read
        text.append(int(logits.argmax()))
        if text[-1] == {end}:  # the end
            break
print(text)
""",
    "torch": """step = {open}
sizes = {{"batch": 1, "past": 0, "chunks": 20}}
state = [
    torch.full([sizes.get(axis, axis) for axis in one["shape"]], one["start"], dtype=getattr(torch, one["dtype"]))
    for one in parts["step"]["inputs"]
    if "start" in one
]
text = [{begin}]  # {what}
for place in range(20):
    logits, *state = step(torch.tensor([text[place]]), *state, *memory)
    if place == len(text) - 1:  # all is read
        text.append(int(logits.argmax()))
        if text[-1] == {end}:  # the end
            break
print(text)
""",
}
SYMBOLS = "numbers of the tokenizer's symbols"
HIDDEN = "the beginning, and symbols of the tokenizer; {hides} stands for a hidden word"
BEGINS = "begins with the symbol that ends texts"
GOES_ON = f"{BEGINS}; what is to be continued follows"
NO_MEMORY = {"onnx": "memory = {}\n", "torch": "memory = []\n"}
DESCRIBED = 'import json\n\n{imports}\nparts = json.load(open("export.json"))["parts"]\n'


def usage(form: str, parts: Sequence[Part], end: int = 0, hides: int | None = None) -> str:
    """Markdown with a program for each way to use the parts.

    end: the symbol that ends a text and begins another; of a masked language model, the one that texts begin with.
    hides: of such a model, the symbol that stands in the place of hidden words.
    """
    found = []
    for part in parts:
        opened = OPEN[form].format(name=part.name)
        if part.name == "model" and "images" in part.inputs:
            shape = ", ".join(map(str, part.shapes["images"][1:]))
            found.append(f"{IMPORTS[form]}\n{IMAGES[form].format(open=opened, shape=shape)}")
        elif part.name == "model":
            tokens, what = (
                ("4, 5, 6", SYMBOLS) if hides is None else (f"{end}, 4, {hides}, 6", HIDDEN.format(hides=hides))
            )
            found.append(f"{IMPORTS[form]}\n{TEXT[form].format(open=opened, tokens=tokens, what=what)}")
        elif part.name == "step":
            has_encoder = any(one.name == "encoder" for one in parts)
            encoder = ENCODER[form].format(open=OPEN[form].format(name="encoder"), end=end)
            memory = encoder if has_encoder else NO_MEMORY[form]
            begin, what = (f"{end}", BEGINS) if has_encoder else (f"{end}, 4, 5, 6", GOES_ON)
            steps = STEPS[form].format(open=opened, begin=begin, what=what, end=end)
            found.append(DESCRIBED.format(imports=IMPORTS[form]) + memory + steps)
    needed = {"onnx": "onnxruntime", "torch": "torch"}[form]
    head = f"The files need {needed} and nothing else. `export.json` says what each takes and gives."
    return "\n\n".join([head, *(f"```python\n{program}```" for program in found)])
