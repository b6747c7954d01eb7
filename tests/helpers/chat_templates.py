"""Three chat templates in the manner of well-known families, with tokenizers for them."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

QWEN = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nCall: <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>'
    + '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'assistant' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}
{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Qwen 3 leaves the reasoning of all turns before the last question out.
QWEN3 = QWEN.replace(
    "{%- for message in messages %}",
    """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}
{%- endif %}{%- endfor %}
{%- for message in messages %}""",
).replace(
    "{%- if message.role == 'user' or",
    """\
{%- if message.role == 'assistant' and loop.index0 < ns.last %}
{{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n')
    + '<|im_end|>\\n' }}
{%- elif message.role == 'user' or""",
)

LLAMA3 = """\
{{- bos_token }}{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson)
    + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and message.role == 'user' and loop.index0 == 0 %}
{{- 'Answer with {"name": function name, "parameters": dictionary}.\\n\\n' }}
{%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}{%- endif %}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n'
    + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

# Mistral shows the tools before the last user turn, wherever that is.
MISTRAL = """\
{{- bos_token }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and message == users[-1] %}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}{{- message.content + eos_token }}{%- endif %}{%- endfor %}"""

_SPECIAL = {
    "qwen": ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
    "llama3": (
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|python_tag|>",
    ),
    "gemma": ("<bos>", "<end_of_turn>", "<start_of_turn>"),
    "mistral": (
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
    ),
}
TEMPLATES = {"qwen": QWEN, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL}
_MERGES = [
    ("t", "h"),
    ("th", "e"),
    ("i", "n"),
    ("\u0120", "the"),
    ("a", "n"),
    ("e", "r"),
    ("o", "n"),
    ("l", "l"),
    ("<", "t"),
    ("u", "s"),
    ("us", "er"),
]


def chat_tokenizer(family: str, *, template: str = "") -> PreTrainedTokenizerFast:
    """Make a byte-level BPE tokenizer with some merges and a family's special tokens.

    The second special token ends a turn and is eos.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = letters + [a + b for a, b in _MERGES]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, _MERGES))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    names = _SPECIAL[family]
    words = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=names[0],
        eos_token=names[1],
        extra_special_tokens=list(names[2:]),
        clean_up_tokenization_spaces=False,
    )
    words.chat_template = template or TEMPLATES[family]
    return words
