"""Secrets to plant, made without the detector: each kind as its service makes it, in a text as
agents meet it. docs/models.md has no part in it; the kinds are those that the detector promises."""

from __future__ import annotations

import base64
import json
import string
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

LETTERS = string.ascii_letters
WORDS = LETTERS + string.digits
CAPITALS = string.ascii_uppercase + string.digits
HEX = "0123456789abcdef"
SAFE = WORDS + "-_"


@dataclass(frozen=True, slots=True)
class Planted:
    """Example: Planted("password", "x7!kPq2", "DB_PASSWORD=x7!kPq2")"""

    kind: str
    secret: str
    text: str

    @property
    def parts(self) -> list[str]:
        """What must not be seen of it: all of it, or each line of a key."""
        lines = [line for line in self.secret.split("\n") if "PRIVATE KEY" not in line]
        return [line for line in lines if len(line) >= 6]


def some(random: Random, count: int, of: str = WORDS) -> str:
    return "".join(random.choice(of) for _ in range(count))


def bits(random: Random, count: int) -> str:
    return base64.b64encode(random.randbytes(count)).decode()


def word(random: Random) -> str:
    return "".join(random.choice("bcdfghklmnprst") + random.choice("aeiou") for _ in range(3))


def password(random: Random) -> str:
    """With a digit in it, as most rules for passwords ask for."""
    return (
        some(random, 6, LETTERS)
        + some(random, 2, string.digits)
        + some(random, 5, WORDS + "!#*-+=?")
    )


def key_block(random: Random, label: str, count: int) -> str:
    body = bits(random, count)
    lines = [body[at : at + 64] for at in range(0, len(body), 64)]
    return "\n".join([f"-----BEGIN {label}-----", *lines, f"-----END {label}-----"])


def json_token(random: Random) -> str:
    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    return f"{part({'alg': 'HS256'})}.{part({'sub': some(random, 8)})}.{some(random, 43, SAFE)}"


Maker = Callable[[Random], tuple[str, str]]
"""A secret, and a text in which `{}` is its place."""

MAKERS: dict[str, Maker] = {
    "AWS access key": lambda r: ("AKIA" + some(r, 16, CAPITALS), "aws configure: {} eu-west-1"),
    "AWS secret key": lambda r: (some(r, 40, WORDS + "+/"), "aws_secret_access_key = {}"),
    "GitHub token": lambda r: ("ghp_" + some(r, 36), "git clone https://{}@github.com/acme/site"),
    "GitHub fine-grained token": lambda r: (
        f"github_pat_{some(r, 22)}_{some(r, 59)}",
        "I use the token {} for it.",
    ),
    "GitLab token": lambda r: ("glpat-" + some(r, 20, SAFE), "Push with {}, please."),
    "Slack token": lambda r: (
        f"xoxb-{some(r, 12, string.digits)}-{some(r, 12, string.digits)}-{some(r, 24)}",
        "slack: {}",
    ),
    "Slack webhook": lambda r: (
        f"T{some(r, 8, CAPITALS)}/B{some(r, 10, CAPITALS)}/{some(r, 24)}",
        "curl -d hi https://hooks.slack.com/services/{}",
    ),
    "Discord webhook": lambda r: (
        f"{some(r, 18, string.digits)}/{some(r, 68, SAFE)}",
        "https://discord.com/api/webhooks/{}",
    ),
    "Stripe key": lambda r: ("sk_live_" + some(r, 24), "stripe.api_key = '{}'"),
    "OpenAI key": lambda r: (
        f"sk-proj-{some(r, 74, SAFE)}T3BlbkFJ{some(r, 74, SAFE)}",
        "OPENAI_API_KEY={}",
    ),
    "Anthropic key": lambda r: (f"sk-ant-api03-{some(r, 93, SAFE)}AA", "Key: {}"),
    "Google key": lambda r: ("AIza" + some(r, 35, SAFE), "/maps/api/js?key={}&v=3"),
    "Google client secret": lambda r: ("GOCSPX-" + some(r, 28, SAFE), '"client_secret":"{}"'),
    "Google service account": lambda r: (
        key_block(r, "PRIVATE KEY", 600),
        "service account:\n{}",
    ),
    "Azure connection string": lambda r: (
        bits(r, 64),
        "DefaultEndpointsProtocol=https;AccountName=acme;AccountKey={};EndpointSuffix=x",
    ),
    "npm token": lambda r: ("npm_" + some(r, 36), "//registry.npmjs.org/:_authToken={}"),
    "PyPI token": lambda r: ("pypi-AgEIcHlwaS5vcmc" + some(r, 150, SAFE), "twine upload -p {}"),
    "Hugging Face token": lambda r: ("hf_" + some(r, 33, LETTERS) + "7", "hf auth login {}"),
    "Telegram token": lambda r: (
        f"{some(r, 10, '123456789')}:AA{some(r, 33, SAFE)}",
        "https://api.telegram.org/bot{}/getMe",
    ),
    "Twilio key": lambda r: ("SK" + some(r, 32, HEX), "twilio {}"),
    "SendGrid key": lambda r: (f"SG.{some(r, 22, SAFE)}.{some(r, 43, SAFE)}", "mail with {}"),
    "JSON web token": lambda r: (json_token(r), "the cookie held {} until now"),
    "RSA key": lambda r: (key_block(r, "RSA PRIVATE KEY", 600), "$ cat key.pem\n{}\n$"),
    "OpenSSH key": lambda r: (key_block(r, "OPENSSH PRIVATE KEY", 300), "id_ed25519:\n{}"),
    "PostgreSQL address": lambda r: (
        password(r),
        f"DATABASE_URL=postgresql://{word(r)}:{{}}@db.internal:5432/app",
    ),
    "MongoDB address": lambda r: (some(r, 12), f"mongodb+srv://{word(r)}:{{}}@c0.mongodb.net/x"),
    "Redis address": lambda r: (some(r, 12), "redis://:{}@cache:6379/0"),
    "AMQP address": lambda r: (some(r, 12), f"amqp://{word(r)}:{{}}@mq:5672/"),
    "basic address": lambda r: (some(r, 12), f"curl https://{word(r)}:{{}}@example.org/x"),
    "password in an environment": lambda r: (password(r), "PATH=/bin\nDB_PASSWORD={}\nHOME=/root"),
    "password in JSON": lambda r: (password(r), '{{"user": "bob", "password": "{}"}}'),
    "password in YAML": lambda r: (password(r), "user: bob\npassword: {}\nport: 1"),
    "password in code": lambda r: (password(r), "connect(host, password='{}', port=3)"),
    "password of a command": lambda r: (password(r), "mysqldump --password={} app"),
    "password of sshpass": lambda r: (password(r), "sshpass -p '{}' ssh bob@host"),
    "password in .netrc": lambda r: (password(r), "machine h login bob password {}"),
    "password of curl": lambda r: (password(r), "curl -u bob:{} http://host/x"),
    "password hash": lambda r: (
        f"$6${some(r, 12)}${some(r, 86, WORDS + './')}",
        "root:{}:19000:0:99999:7:::",
    ),
    "bearer token": lambda r: (some(r, 32, SAFE), "curl -H 'Authorization: Bearer {}' http://x"),
    "basic authorization": lambda r: (bits(r, 21), "Authorization: Basic {}"),
    "session cookie": lambda r: (some(r, 40), "Cookie: session={}; theme=dark"),
    "API key in an environment": lambda r: (some(r, 32, HEX), "WEATHER_API_KEY={}"),
    "API key in a header": lambda r: (some(r, 40), "x-api-key: {}"),
    "API key in a query": lambda r: (some(r, 40), "GET /v1?x=1&access_token={} HTTP/1.1"),
    "secret in an environment": lambda r: (some(r, 24) + "7", "SESSION_SECRET={}"),
    "token in JSON": lambda r: (some(r, 32), '{{"access_token": "{}", "expires_in": 3600}}'),
    "e-mail address": lambda r: (f"{word(r)}.{word(r)}@{word(r)}.com", "Write to {}, please."),
    "Discord token": lambda r: (
        f"M{some(r, 25)}.{some(r, 6, SAFE)}.{some(r, 37, SAFE)}x",
        "bot {}",
    ),
    "Vault token": lambda r: ("hvs." + some(r, 90), "vault login {}"),
    "age key": lambda r: (
        "AGE-SECRET-KEY-1" + some(r, 58, "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L"),
        "age: {}",
    ),
}


def planted(seed: int, count: int) -> list[Planted]:
    """Secrets of all kinds in turn."""
    random, kinds = Random(seed), list(MAKERS)
    made = []
    for at in range(count):
        kind = kinds[at % len(kinds)]
        secret, text = MAKERS[kind](random)
        made.append(Planted(kind, secret, text.format(secret)))
    return made
