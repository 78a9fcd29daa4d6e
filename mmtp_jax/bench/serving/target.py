"""The server that is measured: its address, and plain answers of it outside of the measurement."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from mmtp_jax.config import ConfigError, require

GET_SECONDS = 30


@dataclass(frozen=True)
class Target:
    """A server's address; `path` is what comes before `/v1`. `api_key` None: send none."""

    scheme: str
    host: str
    port: int
    path: str
    api_key: str | None

    @classmethod
    def of(cls, base_url: str, api_key: str | None) -> Target:
        """With or without `/v1` at its end. Raises `ConfigError`."""
        try:
            url = urlsplit(base_url)
            host, port = url.hostname, url.port
            (host or "").encode("idna")  # as whoever looks it up does
        except ValueError as error:
            raise ConfigError(f"--base-url must be an address, got {base_url}: {error}") from None
        require(
            url.scheme in ("http", "https") and host is not None and "@" not in url.netloc,
            f"--base-url must be http://HOST:PORT or https://HOST:PORT, got {base_url}",
        )
        require(
            api_key is None or (api_key.isascii() and api_key.isprintable()),
            "--api-key must hold printable ASCII characters",
        )
        assert host is not None
        path = url.path.rstrip("/").removesuffix("/v1")
        require(
            path.isascii() and f"{host}{path}".isprintable() and " " not in f"{host}{path}",
            f"--base-url must hold ASCII characters without spaces, got {base_url}",
        )
        default = 443 if url.scheme == "https" else 80
        return cls(url.scheme, host, port or default, path, api_key)

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self._host}:{self.port}{self.path}"

    @property
    def tls(self) -> ssl.SSLContext | None:
        """How to encrypt; `SSL_CERT_FILE` names certificates to trust beside the system's."""
        return ssl.create_default_context() if self.scheme == "https" else None

    def post(self, path: str) -> bytes:
        """The head of a request with a JSON body, up to the body's length in decimal digits."""
        lines = [
            f"POST {self.path}{path} HTTP/1.1",
            f"Host: {self._host}:{self.port}",
            *(f"{name}: {value}" for name, value in self._headers().items()),
            "Accept: text/event-stream",
            "Content-Type: application/json",
            "Content-Length: ",
        ]
        return "\r\n".join(lines).encode()

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of `GET path`. Raises `OSError` if there is no HTTP server."""
        connection: http.client.HTTPConnection
        if self.tls is None:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=GET_SECONDS)
        else:
            connection = http.client.HTTPSConnection(
                self.host, self.port, timeout=GET_SECONDS, context=self.tls
            )
        try:
            connection.request("GET", self.path + path, headers=self._headers())
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise OSError(f"not an HTTP server ({type(error).__name__})") from None
        finally:
            connection.close()

    def check(self, name: str | None) -> str:
        """The model to ask for: `name`, or the first of `/v1/models`. Raises `ConfigError` if the
        server cannot be reached or does not say."""
        try:
            status, body = self.get("/v1/models")
        except OSError as error:
            raise ConfigError(f"cannot reach {self.url}: {reason(error)}") from None
        if name is not None:
            return name
        if status != 200:
            raise ConfigError(
                f"{self.url}/v1/models answered {status}"
                f"{said(body)}; --model names the model without asking"
            )
        try:
            found = json.loads(body)["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            found = None
        if not isinstance(found, str):
            raise ConfigError(f"{self.url}/v1/models names no model; --model does")
        return found

    @property
    def _host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    def _headers(self) -> dict[str, str]:
        headers = {"User-Agent": "mmtp-bench"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers


def reason(error: OSError) -> str:
    """Why a connection failed, without addresses, so that equal failures are equal texts."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate refused: {error.verify_message}"
    if isinstance(error, (ssl.SSLError, socket.gaierror)):
        return error.strerror or str(error)
    if isinstance(error, TimeoutError):
        return "timed out"
    return os.strerror(error.errno) if error.errno else str(error)


def said(body: bytes) -> str:
    """The message of an error's body in the forms of OpenAI's API and FastAPI, ": " before it."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    for key in ("error", "message", "detail"):
        if isinstance(value, dict):
            value = value.get(key, value)
    return f": {' '.join(value.split())[:200]}" if isinstance(value, str) and value else ""
