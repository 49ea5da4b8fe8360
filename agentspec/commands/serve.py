"""`agentspec serve`: an OpenAI-compatible server on a local model."""

import argparse
import logging
import sys

from agentspec.commands.demo import demonstrate
from agentspec.commands.engine import loaded_engine
from agentspec.commands.settings import add_settings, chosen_config

log = logging.getLogger(__name__)

SETTINGS = (
    "model.name", "model.home", "model.dtype", "engine.device", "model.threads", "model.window",
    "server.host", "server.port",
    "cache.redis_url", "cache.redis_password_file", "cache.redis_ca_file", "cache.history_file",
    "cache.corpora",
    "engine.max_running", "engine.max_queue", "engine.kv_bytes", "engine.max_draft_tokens",
)  # fmt: skip


ABOUT = """Serves a model at http://HOST:PORT/v1 until it is stopped with Ctrl-C or SIGTERM. A model that is not on this
machine yet is fetched and converted first. Flags win over environment variables, which each flag names; the settings
without a flag are listed by 'agentspec config'."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser("serve", help="serve a model to agents over the OpenAI API", description=ABOUT)
    add_settings(parser, *SETTINGS)
    parser.add_argument(
        "--demo", action="store_true", help="replay two shipped agent runs first, with speculation off and on"
    )
    parser.set_defaults(run=run_serve)


def run_serve(arguments: argparse.Namespace) -> None:
    """Loads the model and serves it until a signal ends the process."""
    config = chosen_config(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for library in ("httpx", "uvicorn"):
        logging.getLogger(library).setLevel(logging.WARNING)
    from agentspec.server.run import listen, serve

    listen(config.server).close()
    log.info("loading %s", config.model.name)
    engine = loaded_engine(config)

    async def welcome(url: str) -> None:
        if arguments.demo:
            await demonstrate(url)
        print(greeting(url, engine.model), flush=True)

    serve(engine, config.server, alongside=welcome)
    print("Stopped.", flush=True)


def greeting(url: str, model: str) -> str:
    """How to point an agent at the server."""
    return (
        f"Serving {model} at {url}/v1 (Ctrl-C stops)\n"
        f"  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=unused\n"
        f"  model name: {model}; metrics: {url}/metrics\n"
        "  Send X-AgentSpec-Trajectory: <id of the agent run> to say which requests belong together."
    )
