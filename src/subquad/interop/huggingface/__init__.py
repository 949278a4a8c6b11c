"""Our models in the format of Hugging Face. Importing this module registers them with the Auto classes of transformers.

    import subquad.interop.huggingface
    model = AutoModelForCausalLM.from_pretrained("exported")

Without the import, `from_pretrained("exported", trust_remote_code=True)` finds them too (see interop/remote_code.py).

`subquad export RUN --to huggingface` (`save_huggingface` here) writes such a folder. Only this folder of subquad needs
transformers, which `pip install 'subquad[hf]'` installs.
"""

from subquad.packages import require_transformers

require_transformers("a model in Hugging Face's format")

from transformers import (  # noqa: E402
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from transformers.utils import is_vision_available  # noqa: E402

from subquad.interop.huggingface.cache import SubquadCache  # noqa: E402
from subquad.interop.huggingface.config import SubquadConfig  # noqa: E402
from subquad.interop.huggingface.encoders import SubquadForMaskedLM, SubquadForSequenceClassification  # noqa: E402
from subquad.interop.huggingface.images import SubquadForImageClassification, SubquadImageProcessor  # noqa: E402
from subquad.interop.huggingface.saving import save_huggingface  # noqa: E402
from subquad.interop.huggingface.text import SubquadForCausalLM, SubquadForSeq2SeqLM  # noqa: E402
from subquad.interop.huggingface.tokenizer import SubquadPieces, SubquadTokenizer  # noqa: E402
from subquad.interop.patching import register_attention  # noqa: E402
from subquad.interop.patching.swapped_classes import SwappedConfig  # noqa: E402

register_attention()

AutoConfig.register(SubquadConfig.model_type, SubquadConfig)
AutoModelForCausalLM.register(SubquadConfig, SubquadForCausalLM)
AutoModelForSeq2SeqLM.register(SubquadConfig, SubquadForSeq2SeqLM)
AutoModelForImageClassification.register(SubquadConfig, SubquadForImageClassification)
AutoModelForMaskedLM.register(SubquadConfig, SubquadForMaskedLM)
AutoModelForSequenceClassification.register(SubquadConfig, SubquadForSequenceClassification)
AutoTokenizer.register(SubquadConfig, slow_tokenizer_class=SubquadTokenizer)
AutoTokenizer.register(SubquadConfig, fast_tokenizer_class=SubquadPieces, exist_ok=True)
if is_vision_available():  # without Pillow, transformers refuses every use of the class, this one too
    AutoImageProcessor.register(SubquadConfig, slow_image_processor_class=SubquadImageProcessor)

__all__ = [
    "SubquadCache",
    "SubquadConfig",
    "SubquadForCausalLM",
    "SubquadForImageClassification",
    "SubquadForMaskedLM",
    "SubquadForSeq2SeqLM",
    "SubquadForSequenceClassification",
    "SubquadImageProcessor",
    "SubquadPieces",
    "SubquadTokenizer",
    "SwappedConfig",
    "save_huggingface",
]
