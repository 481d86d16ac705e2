"""A chat template that would not end, or would not fit into memory, is refused; honest ones are
rendered as before."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from proxy.config import RenderingConfig
from proxy.errors import ConfigurationError
from proxy.rendering.chat_template import ChatTemplate, RunawayTemplate
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer

MESSAGES = [
    {"role": "user", "content": "Say 99999999999999."},
    {"role": "assistant", "content": "a"},
]


def repeated(value: str, begin: str = "'ab'") -> str:
    """A template that sets `n.s` to the value 99 times."""
    loop = f"{{% for a in range(99) %}}{{% set n.s = {value} %}}{{% endfor %}}"
    return f"{{% set n = namespace(s={begin}) %}}" + loop


def looped(body: str, over: str = "messages") -> str:
    return f"{{% for m in {over} %}}{body}{{% endfor %}}"


RUNAWAYS = {
    "nested-loops": looped(looped("", "range(90000)"), "range(90000)"),
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macros": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "recursive-loop": (
        "{% set l = [1] %}{% for a in l recursive %}{{ loop(l) }}{{ loop(l) }}{% endfor %}"
    ),
    "doubled": repeated("n.s ~ n.s"),
    "added": repeated("n.s + n.s"),
    "added-lists": repeated("n.s + n.s", "[1]"),
    "replaced": repeated("n.s|replace('a', 'aa')"),
    "replaced-by-method": repeated("n.s.replace('a', 'aa')"),
    "times": "{{ 'ab' * 10 ** 10 }}",
    "times-list": "{{ 10 ** 10 * [1] }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "width": "{{ '%10000000000d' % 1 }}",
    "given-width": "{{ '%*d' % (10000000000, 1) }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "nested-width": "{{ '{:>{}}'.format(1, 10000000000) }}",
    "format-filter": "{{ '%10000000000d'|format(1) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "center": "{{ 'a'|center(10000000000) }}",
    "indent": "{{ 'a\nb'|indent(10000000000) }}",
}

HONEST = (
    looped("{{ loop.index ~ m.role ~ ': ' ~ m.content + '.' }}{{ loop.last }}"),
    "{% macro f(m) %}<{{ m.content|trim|replace('9', 'nine') }}>{% endmacro %}"
    + looped("{{ f(m) }}"),
    "{% for m in messages if m.role == 'user' %}{{ m|tojson }}{% else %}none{% endfor %}",
    "{{ '%s: %5d' % (messages[0].role, 7) }}{{ messages|map(attribute='role')|join(', ') }}",
    "{{ messages[0].content.split('9')|length }}{{ 'a'.ljust(9) }}|{{ '{:>4}'.format(1) }}",
    "{{ '%d'|format(99999999999) }}{{ '%d' % 99999999999 }}{{ '{}'.format(99999999999) }}",
    "{{ nothing|default(99999999999) }}{% macro f(n) %}{{ n }}{% endmacro %}{{ f(99999999999) }}",
    "{{ 2 ** 10 * 3 }}{{ 10 ** 9 * 10 ** 9 }}{{ [1] * 3 }}{{ 7 % 4 }}{{ 2 * 'ab' }}{{ -2 * 1.5 }}",
    "{% macro f() %}{{ caller(1) }}{% endmacro %}{% call(x) f() %}{{ x }}{% endcall %}",
    "{% for a in [[1, [2]], 3] recursive %}{{ a if a is number else loop(a) }}{% endfor %}",
    "{% generation %}{{ messages|selectattr('role', 'equalto', 'user')|list }}{% endgeneration %}",
    looped("{{ m.role }}{% for x in nothing %}{% else %}-{% endfor %}{{ loop.length }}"),
    looped("{% if m.role == 'user' %}{% break %}{% endif %}{{ loop.index0 }}", "messages[::-1]"),
)


@pytest.mark.parametrize("source", RUNAWAYS.values(), ids=RUNAWAYS)
def test_runaway_template_is_refused(source: str) -> None:
    template = ChatTemplate(source, {}, {})
    with pytest.raises(RunawayTemplate, match="template"):
        template.render(MESSAGES, None, add_generation_prompt=True)


def test_runaway_template_is_refused_at_the_start(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(RUNAWAYS["nested-loops"])
    for renderer in ("auto", "template"):
        with pytest.raises(ConfigurationError, match=r"repeats its loops .* chat_template\.jinja"):
            Rendering(load_tokenizer(tmp_path), RenderingConfig(renderer=renderer))


@pytest.mark.parametrize("source", HONEST)
def test_honest_template_is_rendered_as_by_transformers(source: str) -> None:
    ours = ChatTemplate(source, {}, {}).render(MESSAGES, None, add_generation_prompt=False)
    (theirs,), _ = render_jinja_template([MESSAGES], chat_template=source)
    assert ours == theirs


def test_long_conversation_may_be_gone_through_once_for_each_message() -> None:
    source = "{% for a in messages %}{% for b in messages %}{% endfor %}{% endfor %}done"
    messages = [{"role": "user", "content": ""}] * 1100
    assert (
        ChatTemplate(source, {}, {}).render(messages, None, add_generation_prompt=False) == "done"
    )
