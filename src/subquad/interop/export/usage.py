"""The programs in the card of an export. Each can be run as it is, in the folder of the export, without subquad."""

from collections.abc import Sequence

from subquad.interop.export.graphs import ExportGraph

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
source = np.array([[4, 5, {end}]])  # token ids of the tokenizer, with the end
names = [one["name"] for one in parts["encoder"]["outputs"]]
found = encoder.run(names, {{"source": source, "padding": np.zeros(source.shape, bool)}})
memory = dict(zip(names, found))
""",
    "torch": """encoder = {open}
source = torch.tensor([[4, 5, {end}]])  # token ids of the tokenizer, with the end
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
    if place == len(text) - 1:  # the given text is read
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
    if place == len(text) - 1:  # the given text is read
        text.append(int(logits.argmax()))
        if text[-1] == {end}:  # the end
            break
print(text)
""",
}
BEGINS = "begins with the token that ends texts"
TOKENS = f"{BEGINS}; then token ids of the tokenizer"
MASKED = "the first token and token ids of the tokenizer; {mask} masks a word"
CONTINUES = f"{BEGINS}; then the text to continue"
NO_MEMORY = {"onnx": "memory = {}\n", "torch": "memory = []\n"}
DESCRIBED = 'import json\n\n{imports}\nparts = json.load(open("export.json"))["parts"]\n'


def usage(form: str, graphs: Sequence[ExportGraph], end: int = 0, mask: int | None = None) -> str:
    """Returns Markdown with a program for each way to use the graphs.

    end: the token that ends a text and begins another; for a masked language model, the first token of a text.
    mask: for a masked language model, the mask token.
    """
    programs = []
    for graph in graphs:
        open_graph = OPEN[form].format(name=graph.name)
        if graph.name == "model" and "images" in graph.inputs:
            shape = ", ".join(map(str, graph.shapes["images"][1:]))
            programs.append(f"{IMPORTS[form]}\n{IMAGES[form].format(open=open_graph, shape=shape)}")
        elif graph.name == "model":
            tokens, what = f"{end}, 4, 5, 6", TOKENS
            if mask is not None:
                tokens, what = f"{end}, 4, {mask}, 6", MASKED.format(mask=mask)
            programs.append(f"{IMPORTS[form]}\n{TEXT[form].format(open=open_graph, tokens=tokens, what=what)}")
        elif graph.name == "step":
            has_encoder = any(one.name == "encoder" for one in graphs)
            encoder = ENCODER[form].format(open=OPEN[form].format(name="encoder"), end=end)
            memory = encoder if has_encoder else NO_MEMORY[form]
            begin, what = (f"{end}", BEGINS) if has_encoder else (f"{end}, 4, 5, 6", CONTINUES)
            steps = STEPS[form].format(open=open_graph, begin=begin, what=what, end=end)
            programs.append(DESCRIBED.format(imports=IMPORTS[form]) + memory + steps)
    needed = {"onnx": "onnxruntime", "torch": "torch"}[form]
    head = f"The files need only {needed}. `export.json` describes the inputs and outputs of each."
    return "\n\n".join([head, *(f"```python\n{program}```" for program in programs)])
