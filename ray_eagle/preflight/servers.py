"""Checks of the servers that are to answer the prompts: do they, and with which model?"""

import json
from pathlib import PurePath
from typing import Any

import httpx

from ray_eagle.config import GenerateConfig
from ray_eagle.conversations.backends.dialects import OpenAI, RayEagle, Sampling, SGLang
from ray_eagle.conversations.backends.fleet import Fault, reason_of
from ray_eagle.conversations.remote import api_key
from ray_eagle.errors import ServingError
from ray_eagle.preflight.report import Finding, Level
from ray_eagle.target.loading import TargetFacts

LOOK_S = 5.0


def check_servers(settings: GenerateConfig, facts: TargetFacts) -> list[Finding]:
    """One finding a server. Those that cannot be reached are an error only when none can. Raises ConfigError without its key."""
    key = api_key(settings)
    sampling = Sampling(settings.max_new_tokens, settings.temperature, settings.top_p)
    dialect: Any = {
        "openai": lambda: OpenAI(sampling, settings.model, facts.vocab_size),
        "sglang": lambda: SGLang(sampling, [], facts.vocab_size),
        "ray_eagle": lambda: RayEagle(sampling, facts.fingerprint, facts.vocab_size),
    }[settings.backend]()
    findings = []
    silent: list[str] = []
    with httpx.Client(headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=LOOK_S) as client:
        for url in settings.urls:
            try:
                response = client.get(url + dialect.look)
                if response.status_code != 200:
                    raise Fault(f"HTTP {response.status_code}: {reason_of(response.content)}")
                findings.append(_serves(url, dialect.seen(url, response.json()), settings, facts))
            except (httpx.HTTPError, httpx.InvalidURL, Fault, json.JSONDecodeError) as error:
                silent.append(f"{url}{dialect.look}: {type(error).__name__ if not str(error) else error}")
            except ServingError as error:
                findings.append(Finding(level="error", check="servers", message=str(error)))
    level: Level = "warning" if findings else "error"
    fix = "Start it, or correct generate.urls, generate.backend or generate.api_key_env."
    return findings + [Finding(level=level, check="servers", message=f"{message}.", fix=fix) for message in silent]


def _serves(url: str, model: str, settings: GenerateConfig, facts: TargetFacts) -> Finding:
    """Paths differ between machines: the name of the folder is compared, and only for SGLang's own API."""
    message = f"{url} serves {model}"
    if settings.backend != "sglang" or PurePath(model).name == facts.path.name:
        return Finding(level="ok", check="servers", message=f"{message}.")
    fix = "Check that it is the same model: a drafter learns from what this server's model writes."
    return Finding(level="warning", check="servers", message=f"{message}, the target is {facts.path}.", fix=fix)
