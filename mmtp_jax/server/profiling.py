"""`/start_profile` and `/stop_profile`: traces of jax.profiler (see `--profile-dir`)."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from mmtp_jax.server.responses import ERRORS
from mmtp_jax.server.service import WithService

router = APIRouter()


class ProfileDirectory(BaseModel):
    """Where the traces are, on the server's machine."""

    directory: str


@router.post("/start_profile", response_model=ProfileDirectory, responses=ERRORS)
async def start_profile(service: WithService) -> dict[str, str | None]:
    """Trace every step from now on; 409 if a trace is being written."""
    await service.client.profile(service.profile_directory)
    return {"directory": service.profile_directory}


@router.post("/stop_profile", response_model=ProfileDirectory, responses=ERRORS)
async def stop_profile(service: WithService) -> dict[str, str | None]:
    """Finish the trace, which TensorBoard, XProf and Perfetto can show; 409 if there is none."""
    await service.client.profile(None)
    return {"directory": service.profile_directory}
