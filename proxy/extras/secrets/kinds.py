"""The kinds of secrets that are found without a library, each with its pattern.

The library (`library.py`) knows the tokens of 300 services. These patterns find what it lacks:
passwords and keys by the name that they are given, credentials in headers, addresses and command
lines, e-mail addresses; and the most frequent tokens, so that they are found without it, too.

Invariant: no pattern takes more than linear time. Each begins with fixed text or one character,
never with an unbounded repetition.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

LONG_CHARS = 256
"""Longer matches are not looked into."""
MARKER = "[secret:"
"""How a masked secret begins; it is not masked again."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Example: Kind("aws-access-key", "access keys of AWS", re.compile("AKIA…"))"""

    name: str
    says: str
    """For the table of the documentation."""
    pattern: re.Pattern[str]
    """The secret is the group `secret`, or the whole match if there is none."""
    accepts: Callable[[str], bool] = lambda _: True
    """Whether the text in the place of a secret can be one."""
    begins: Sequence[str] = ()
    """What the pattern begins with, in small letters; it is tried there only. Empty: everywhere."""

    def spans(self, text: str, low: str) -> Iterator[tuple[int, int]]:
        """`low`: the text in small letters."""
        group = "secret" if "secret" in self.pattern.groupindex else 0
        for found in self._matches(text, low):
            value = found[group]
            if not value or MARKER in value or _in_marker(text, found.start()):
                continue
            if self.accepts(value):
                yield found.span(group)

    def _matches(self, text: str, low: str) -> Iterator[re.Match[str]]:
        if not self.begins:
            yield from self.pattern.finditer(text)
        for word in self.begins:
            at = low.find(word)
            while at >= 0:
                found, after = self.pattern.match(text, at), at + 1
                if found is not None:
                    yield found
                    # So that the time is linear: within a long value, no other one is looked for.
                    after = found.end() if found.end() - at > LONG_CHARS else after
                at = low.find(word, after)


def small_letters(text: str) -> str:
    """The text in small letters, with as many characters."""
    low = text.lower()
    return low if len(low) == len(text) else text.translate(_ASCII_LOW)


_ASCII_LOW = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


def _in_marker(text: str, at: int) -> bool:
    """Whether the character is in the marker of a masked secret, whose kind may be a name."""
    begun = text.rfind(MARKER, max(0, at - 80), at)
    return begun >= 0 and "]" not in text[begun:at]


def looks_random(value: str) -> bool:
    """At least eight characters, of letters and of another class, and no code, path or number."""
    if len(value) < 8 or _CODE.search(value) or not re.search("[A-Za-z]", value):
        return False
    digits, symbols = re.search(r"\d", value), re.search(r"[^\w]", value)
    cases = re.search("[a-z]", value) and re.search("[A-Z]", value)
    if _is_path(value) or (_is_dotted(value) and len(value) < 32):
        return False
    if digits is not None or (cases and len(value) >= 16):
        return True
    return symbols is not None and cases is not None


def looks_like_password(value: str) -> bool:
    """At least four characters that are not the name of a type, a variable or a call."""
    word = value.lower().strip("*.x<>_-")
    if len(value) < 4 or not word or _NO_PASSWORD.fullmatch(word):
        return False
    return not (
        _CODE.search(value) or _is_dotted(value) or _is_path(value) or _OTHER_NAME.fullmatch(value)
    )


def _is_dotted(value: str) -> bool:
    """Whether it is an attribute, such as `config.password`, without a digit beside both cases."""
    return _DOTTED.fullmatch(value) is not None and not _has_all(value)


def _is_path(value: str) -> bool:
    """Whether it is a path, such as `/run/secrets/db`, and not base64 that begins with a slash."""
    parts = value.split("/")
    return _PATH.fullmatch(value) is not None and not any(
        len(part) >= 12 and _has_all(part) for part in parts
    )


def _has_all(value: str) -> bool:
    return all(re.search(each, value) for each in ("[a-z]", "[A-Z]", r"\d"))


_CODE = re.compile(r"\$\{|\$\(|\{\{|^\{[^}]*\}$|^\$\w+$|^<[\w -]+>$|^%\(|^https?://|^\w+[(\[]")
_SCHEMES = ("bearer", "bearer`.", "basic", "digest", "negotiate")
_PATH = re.compile(r"\.{0,2}/[\w./-]+")
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_OTHER_NAME = re.compile(r"(?i)[a-z_]*(?:passw(?:or)?d|pwd|secret|token|key)[a-z_]*")
_NO_PASSWORD = re.compile(
    "str|string|bytes|int|float|bool|any|none|null|nil|true|false|secretstr|optional|text|varchar|"
    "boolean|undefined|required|field|input|hidden|prompt|empty|char|void|self|request"
)

_PASSWORD = r"(?:passw(?:or)?d|passwd|passphrase|passcode|pwd|(?<![A-Za-z])pass|(?<=_)pw)"
_PASSWORD_BEGINS = ("pass", "pw")
_OWNERS = (
    *("api", "access", "private", "account", "encryption", "encrypt", "signing", "master", "auth"),
    *("session", "service", "webhook", "license", "storage", "deploy", "client"),
)
_KEY_OF = "|".join(f"(?<={word})|(?<={word}[_. -])" for word in _OWNERS)
_KEY = (
    rf"(?:secret|credential|(?:{_KEY_OF})key|cookie|auth(?![a-z])|"
    r"token(?!iz|s?[_-]?(?:ids?\b|count|type|limit|budget|per|used|length|name)))"
)
_KEY_BEGINS = ("secret", "credential", "key", "cookie", "auth", "token")
_NAME_END = r"[\w.\-]{0,40}"
_ASSIGN = r"(?:\\*[\"'])?\]?[ \t]{0,8}(?:=>|:=|==?|:)[ \t]{0,8}"
_QUOTED = r"(?P<quote>\\*[\"'`])(?P<secret>(?:(?!(?P=quote))[^\r\n]){1,4096}?)(?P=quote)"
_BARE = r"(?P<secret>[^\s\"'`,;<>(){}\[\]\\|]{1,4096})"
_LINE = r"(?P<secret>[^\s\"'\\][^\s\"'\\]{0,4095})"
"""The rest of a line of an environment, up to a blank or a quote."""


def _compiled(pattern: str, flags: int = re.IGNORECASE) -> re.Pattern[str]:
    return re.compile(pattern, flags)


KINDS = (
    Kind(
        "private-key",
        "private keys in PEM: RSA, EC, DSA, PKCS#8, OpenSSH, PGP, also cut, numbered or escaped",
        _compiled(
            r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
            r"(?:(?:[^-]|-(?!----)){0,20000}-----END [A-Z0-9 ]{0,40}-----|"
            r"(?:[\s\\rnt\d|:→>]{0,24}[A-Za-z0-9+/=]{16,}){0,400})",
            0,
        ),
    ),
    Kind(
        "password",
        "passwords by their name: in code, JSON, YAML, environments",
        _compiled(_PASSWORD + _NAME_END + _ASSIGN + _QUOTED),
        looks_like_password,
        _PASSWORD_BEGINS,
    ),
    Kind(
        "password",
        "",
        _compiled(_PASSWORD + _NAME_END + _ASSIGN + _BARE),
        looks_like_password,
        _PASSWORD_BEGINS,
    ),
    Kind(
        "password",
        "",
        _compiled(r"(?<=_)(?:PASSWORD|PASSWD|PASS|PWD|PW)=" + _LINE, 0),
        looks_like_password,
    ),
    Kind(
        "password",
        "",
        _compiled(
            r"\bpassword[ \t]{1,8}(?:(?:is|was)[ \t]{1,8})?[\"'`]?(?P<secret>[^\s\"'`]{6,200})"
        ),
        looks_random,
        ("password",),
    ),
    Kind(
        "password",
        "",
        _compiled(
            r"(?:\bsshpass[ \t]{1,4}-p[ \t]{0,4}|--?pass(?:word|phrase|wd)?[ \t=]{1,4}|"
            r"[ \t]-u[ \t]{0,4}[\w.@-]{1,80}:|--user[ =][\w.@-]{1,80}:)[\"']?"
            r"(?P<secret>[^\s\"'\\]{4,200})"
        ),
        lambda value: looks_like_password(value) and not value.isdigit(),
        ("sshpass", "-pass", "--pass", " -u", "\t-u", "--user"),
    ),
    Kind(
        "password",
        "",
        _compiled(r"\bmysql\w{0,10}[^\n|;]{0,80}?[ \t]-p(?P<secret>[^\s\"'\\]{4,200})"),
        looks_like_password,
        ("mysql",),
    ),
    Kind(
        "password-hash",
        "password hashes: crypt, bcrypt, Argon2, scrypt, PBKDF2",
        _compiled(
            r"(?:\$(?:1|2[abxy]?|5|6|7|y|gy|apr1|argon2\w{0,2}|scrypt)\$|pbkdf2_\w{1,10}\$)"
            r"[./A-Za-z0-9$,=+\-]{20,300}",
            0,
        ),
    ),
    Kind(
        "key",
        "API keys, tokens and secrets by their name: in code, JSON, YAML, environments",
        _compiled(_KEY + _NAME_END + _ASSIGN + _QUOTED),
        looks_random,
        _KEY_BEGINS,
    ),
    Kind("key", "", _compiled(_KEY + _NAME_END + _ASSIGN + _BARE), looks_random, _KEY_BEGINS),
    Kind(
        "key",
        "",
        _compiled(r"(?:SECRET|TOKEN|_KEY|_CREDENTIALS?)=" + _LINE, 0),
        looks_random,
    ),
    Kind(
        "key",
        "",
        _compiled(
            r"--?(?:api-?key|token|secret|access-?key)[ \t=]{1,4}[\"']?"
            r"(?P<secret>[^\s\"'\\]{8,400})"
        ),
        looks_random,
        ("-api", "--api", "-token", "--token", "-secret", "--secret", "-access", "--access"),
    ),
    Kind(
        "authorization",
        "the credentials of `Authorization` headers, and cookies",
        _compiled(
            r"\bauthorization[\"'\\]{0,6}[ \t]{0,4}[:=][ \t\"'\\]{0,8}(?:[A-Za-z]{2,20}[ \t]{1,4})?"
            r"(?P<secret>[^\s\"'\\,;]{6,4096})"
        ),
        lambda value: looks_like_password(value) and value.lower() not in _SCHEMES,
        ("authorization",),
    ),
    Kind(
        "authorization",
        "",
        _compiled(r"\b(?:bearer|basic)[ \t]{1,4}(?P<secret>[A-Za-z0-9._~+/=\-]{12,4096})"),
        looks_random,
        ("bearer", "basic"),
    ),
    Kind(
        "authorization",
        "",
        _compiled(
            r"\bcookie[\"']?[ \t]{0,4}:[ \t]{0,4}[\"']?"
            r"(?P<secret>[^\r\n\"'\\]{1,80}=[^\r\n\"'\\]{1,4000})"
        ),
    ),
    Kind(
        "url-password",
        "passwords in addresses: databases, queues, proxies, Git; and tokens in queries",
        _compiled(r"://[^\s/:@\"'<>]{0,80}:(?P<secret>[^\s/\"'<>\\]{1,400})@(?=[\w\[])"),
        lambda value: not _CODE.search(value),
    ),
    Kind(
        "url-password",
        "",
        _compiled(r"://(?P<secret>[^\s/:@\"'<>\\]{16,400})@(?=[\w\[])"),
        looks_random,
    ),
    Kind(
        "url-password",
        "",
        _compiled(
            r"[?&](?:key|token|api_?key|access_?token|auth|sig|signature|secret|password|code|"
            r"x-amz-signature|x-amz-security-token)=(?P<secret>[^&\s\"'<>#\\]{8,2000})"
        ),
        looks_random,
    ),
    Kind(
        "aws-access-key",
        "access keys of AWS",
        _compiled(r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b", 0),
    ),
    Kind(
        "google-key",
        "API keys, client secrets and access tokens of Google",
        _compiled(r"AIza[\w-]{35}|GOCSPX-[\w-]{20,40}|ya29\.[\w-]{20,2000}", 0),
    ),
    Kind(
        "service-token",
        "tokens that begin with a service's name, such as `ghp_`, `glpat-`, `sk-`, `hf_`, `xoxb-`",
        _compiled(
            r"\b(?:[sr]k[-_]|whsec_|gh[pousr]_|github_pat_|gl(?:pat|dt|rt|ptt|ft|soat|cbt)-|"
            r"xox[abeprs]-|xapp-|hf_|npm_|pypi-|dckr_pat_|do[opr]_v1_|shp(?:at|ca|pa|ss)_|sntry[su]_|"
            r"gls?a_|glc_|lin_api_|hv[sb]\.|dapi|nvapi-|tvly-|gsk_|xai-|r8_|pplx-|SG\.|ATATT3|"
            r"AGE-SECRET-KEY-1|figd_|rubygems_|PMAK-|NRAK-|secret_|sl\.|EAA|AC(?=[a-f0-9]{32}\b)|"
            r"SK(?=[a-f0-9]{32}\b))[\w\-.=+/]{16,1000}",
            0,
        ),
        lambda value: re.search(r"\d", value) is not None or len(value) >= 36,
    ),
    Kind(
        "bot-token",
        "tokens of Telegram's and Discord's bots",
        _compiled(
            r"(?<!\d)\d{8,10}:[\w-]{35}(?![\w-])|\b[MNO][\w-]{23,27}\.[\w-]{6}\.[\w-]{27,40}", 0
        ),
    ),
    Kind(
        "webhook",
        "webhooks of Slack, Discord and Teams",
        _compiled(r"hooks\.slack\.com/(?:services|workflows)/(?P<secret>[\w/+-]{20,200})", 0),
    ),
    Kind(
        "webhook",
        "",
        _compiled(
            r"(?:discord(?:app)?\.com/api/webhooks|webhook\.office\.com)/(?P<secret>[\w/@.-]{20,400})",
            0,
        ),
    ),
    Kind(
        "jwt",
        "JSON web tokens",
        _compiled(r"\beyJ[\w-]{8,4096}(?:\.[\w-]{0,4096}){2,4}", 0),
    ),
)


def email_spans(text: str) -> Iterator[tuple[int, int]]:
    """E-mail addresses, found by their `@`. `git@host:path` is not one, and addresses that are
    nobody's are not secret: `noreply@…`, which agents sign commits with, and those of the domains
    that are reserved for examples."""
    at = text.find("@")
    while at >= 0:
        name = _EMAIL_NAME.search(text, max(0, at - 64), at)
        host = _EMAIL_HOST.match(text, at + 1)
        if name is not None and host is not None:
            is_path = name[0] == "git" and _COLON.match(text, host.end())
            if not (is_path or _NOBODYS.fullmatch(text, name.start(), host.end())):
                yield name.start(), host.end()
        at = text.find("@", at + 1)


EMAIL = "email"
_EMAIL_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._%+\-]{0,63})\Z|[A-Za-z0-9]\Z")
_NOBODYS = re.compile(
    r"(?i)(?:no-?reply|do-?not-?reply)@.*|.*@(?:[\w-]+\.)*example\.(?:com|org|net)"
)
_COLON = re.compile(r":[\w/~]")
_EMAIL_HOST = re.compile(
    r"(?:[A-Za-z0-9][A-Za-z0-9\-]{0,62}\.){1,6}"
    r"(?:[A-Za-z]{2}|com|org|net|edu|gov|mil|int|info|biz|app|dev|xyz|online|site|tech|cloud|email|"
    r"name|pro|shop|store|agency|company|group|team|systems|software|solutions|digital|world|"
    r"invalid|internal|local|localhost|example|test|corp|lan)(?![\w-])",
    re.IGNORECASE,
)


def field_kind(key: str, value: str) -> str | None:
    """The kind of a value that JSON has under this key; None if the key is not a secret's name."""
    if value.startswith(MARKER):
        return None
    if _PASSWORD_FIELD.search(key) and looks_like_password(value):
        return "password"
    if _KEY_FIELD.search(key) and looks_random(value):
        return "key"
    return None


_PASSWORD_FIELD, _KEY_FIELD = _compiled(_PASSWORD), _compiled(_KEY)
