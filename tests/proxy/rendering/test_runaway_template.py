"""A chat template that would not end, or would not fit into memory, is refused; honest ones are
rendered as before."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
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
    "nested-width-in-a-map": "{{ '{0:>{0[w]}}'.format({'w': 10000000000}) }}",
    "nested-width-by-name": "{{ '{a:>{w}}'.format_map({'a': 1, 'w': 10000000000}) }}",
    "format-filter": "{{ '%10000000000d'|format(1) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "center": "{{ 'a'|center(10000000000) }}",
    "indent": "{{ 'a\nb'|indent(10000000000) }}",
    "bytes": "{{ 'a'.encode().ljust(10000000000) }}",
    "bytes-of-a-number": "{{ (1).to_bytes(10000000000, 'big') }}",
    "squared": repeated("n.s * n.s", "2"),
    **{
        name: f"{{% set big = 'a\t' * 20000000 %}}{body}"
        for name, body in {
            "joined": "{{ range(1000)|join(big) }}",
            "joined-by-method": "{{ big.join(range(1000)|map('string')) }}",
            "joined-lazily": "{{ range(1000)|map('replace', '', big)|map('trim')|join }}",
            "many": "{{ ([big] * 1000)|join }}",
            "many-lists": "{% set l = [big] * 1000 %}{% set l = [l] * 1000 %}{{ [l] * 1000 }}",
            "many-lists-as-json": "{{ ([big] * 1000)|tojson }}",
            "many-added": "{{ ([[1] * 20000000] * 1000)|sum(start=[]) }}",
            "replaced-by-long": "{{ ('a' * 1000).replace('a', big) }}",
            "translated": "{{ ('a' * 1000).translate({97: big}) }}",
            "percent": "{{ ('%s' * 1000) % ((big,) * 1000) }}",
            "percent-of-a-map": "{{ ('%(a)s' * 1000) % {'a': big} }}",
            "formatted": "{{ ('{0}' * 1000).format(big) }}",
            "concatenated": "{{ " + " ~ ".join(["big"] * 1000) + " }}",
            "written": looped("{{ big }}", "range(1000)"),
            "written-by-a-macro": (
                "{% macro f() %}" + looped("{{ big }}", "range(1000)") + "{% endmacro %}{{ f() }}"
            ),
            "written-to-a-name": (
                "{% set x %}" + looped("{{ big }}", "range(1000)") + "{% endset %}{{ x }}"
            ),
            "tabs": "{{ big.expandtabs(1000) }}",
            "indents": "{{ big.replace('\t', '\n')|indent(1000) }}",
            "indents-by-text": "{{ ('a\n' * 1000)|indent(big) }}",
            "wrapped": "{{ ('a ' * 1000)|wordwrap(1, wrapstring=big) }}",
            "indented-json": "{{ range(1000)|list|tojson(indent=100000000) }}",
            "kept": (
                "{% set n = namespace(l=[]) %}"
                + looped("{% set n.l = n.l + [big ~ m] %}", "range(1000)")
            ),
            "kept-by-map": "{{ ([big] * 1000)|map('upper')|list|length }}",
            "cased": "{{ ([big] * 1000)|upper }}",
            "mapped": "{{ big|map('trim')|list|length }}",
        }.items()
    },
}

HONEST = (
    looped("{{ loop.index ~ m.role ~ ': ' ~ m.content + '.' }}{{ loop.last }}"),
    "{% macro f(m) %}<{{ m.content|trim|replace('9', 'nine') }}>{% endmacro %}"
    + looped("{{ f(m) }}"),
    "{% for m in messages if m.role == 'user' %}{{ m|tojson }}{% else %}none{% endfor %}",
    "{{ '%s: %5d' % (messages[0].role, 7) }}{{ messages|map(attribute='role')|join(', ') }}",
    "{{ messages[0].content.split('9')|length }}{{ 'a'.ljust(9) }}|{{ '{:>4}'.format(1) }}",
    "{{ '%d'|format(99999999999) }}{{ '%d' % 99999999999 }}{{ '{}'.format(99999999999) }}",
    "{{ '{:{}}|{:>{}}'.format('a', 3, 1, 4) }}{{ '{a[b]:>{w}}'.format(a={'b': 7}, w=3) }}",
    "{{ '%-*d|' % (4, 1) }}{{ '{x}'.format_map({'x': messages}) }}{{ 'ab'|indent(2, true) }}",
    "{{ messages|map(attribute='role')|map('upper')|join('; ') }}{{ '-'.join(['a', 'b']) }}",
    "{{ messages|tojson(indent=2) }}{{ [[1], [2, 3]]|sum(start=[]) }}{{ 'a<b'|escape }}",
    "{{ 'a\tb'.expandtabs(4) }}{{ 'one two'|wordwrap(4) }}{{ (2 ** 70) * (3 ** 50) }}",
    "{% set x %}{{ messages }}{% endset %}{{ x|length }}{{ {'a': [1, none]} ~ [true] }}",
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
    with memory(3 << 30), pytest.raises(RunawayTemplate, match="template") as refused:
        template.render(MESSAGES, None, add_generation_prompt=True)
    assert "MemoryError" not in str(refused.value)


@contextmanager
def memory(more: int) -> Iterator[None]:
    """What is allocated beyond `more` bytes is a MemoryError."""
    used = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


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


def test_long_conversation_may_be_added_up() -> None:
    source = "{% set n = namespace(s='') %}" + looped("{% set n.s = n.s + m.content %}")
    messages = [{"role": "user", "content": "a" * 4000}] * 1000
    template = ChatTemplate(source + "{{ n.s|length }}", {}, {})
    assert template.render(messages, None, add_generation_prompt=False) == "4000000"


def test_long_conversation_may_be_gone_through_once_for_each_message() -> None:
    source = "{% for a in messages %}{% for b in messages %}{% endfor %}{% endfor %}done"
    messages = [{"role": "user", "content": ""}] * 1100
    assert (
        ChatTemplate(source, {}, {}).render(messages, None, add_generation_prompt=False) == "done"
    )
