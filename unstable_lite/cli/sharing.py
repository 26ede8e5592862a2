"""Commands that give a trained model to others: serve, push."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unstable_lite.cli.options import Debug, SetKeys, TrustConfig, console, errors_as_messages

RunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]


def serve(
    run_directory: RunDirectory,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(help="The number of an update, 'best' or 'last' (default); repeated for several models."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address; other machines can reach any but 127.0.0.1.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME_API_KEY", help="Environment variable with the key of requests.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model in requests; default: <run>/ckpt-N.")] = None,
    template: Annotated[
        str | None, typer.Option(help="Prompt template of observations; default: that of the run's first training env.")
    ] = None,
    override: SetKeys = None,
    trust_config: TrustConfig = False,
    debug: Debug = False,
) -> None:
    """Serve a checkpoint, and the base, behind an OpenAI-compatible endpoint until Ctrl-C."""
    with errors_as_messages(debug):
        from unstable_lite.orchestrator.event_loop import run_in_loop
        from unstable_lite.sharing.served_models import plan_serving
        from unstable_lite.sharing.server import checked_address
        from unstable_lite.sharing.server import serve as serve_models

        address = checked_address(host, port, api_key_env)
        serving = plan_serving(run_directory, checkpoint or (), name, template, override or (), trust_config)
        run_in_loop(serve_models(serving, address, lambda text: console().print(text, soft_wrap=True)))


def push(
    run_directory: RunDirectory,
    repository: Annotated[str, typer.Argument(metavar="REPO", help="USER/NAME on the Hugging Face hub.")],
    checkpoint: Annotated[str, typer.Option(help="The number of an update, 'best' or 'last'.")] = "last",
    merge: Annotated[bool, typer.Option("--merge", help="The whole model, with the adapter merged in.")] = False,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    dry_run: Annotated[
        Path | None, typer.Option("--dry-run", metavar="DIR", help="Write this new folder, and upload nothing.")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The base on the hub, if model_name is a local directory.")
    ] = None,
    license: Annotated[str | None, typer.Option(help="Licence for the card, such as 'apache-2.0'.")] = None,
    trust_config: TrustConfig = False,
    debug: Debug = False,
) -> None:
    """Publish a checkpoint on the Hugging Face hub: adapter or merged model, with a model card."""
    with errors_as_messages(debug):
        from unstable_lite.sharing.publishing import plan_publication, upload, write_folder

        publication = plan_publication(
            run_directory,
            repository,
            checkpoint,
            base=base_model,
            merges=merge,
            license=license,
            trusts_config=trust_config,
        )
        out = console()
        if dry_run is not None:
            write_folder(publication, dry_run)
            out.print(f"{dry_run}: {', '.join(sorted(file.name for file in dry_run.iterdir()))}", soft_wrap=True)
        else:
            out.print(upload(publication, private, lambda text: out.print(text, soft_wrap=True)), soft_wrap=True)
