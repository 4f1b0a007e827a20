"""The files of the service's own page. They hold no data, so that a browser gets them before it has a token."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

FOLDER = Path(__file__).with_name("page")
INDEX = "index.html"

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page, as it is served."""

    content: bytes
    media_type: str
    etag: str

    @classmethod
    def read(cls, path: Path) -> "PageFile":
        """Read the file from the package."""
        content = path.read_bytes()
        return cls(content, _TYPES[path.suffix], f'"{sha256(content).hexdigest()[:32]}"')


class PageFiles:
    """Handlers over the files, which are read once. A browser asks whether they changed each time it opens the page."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {path.name: PageFile.read(path) for path in sorted(folder.iterdir()) if path.suffix in _TYPES}

    async def index(self, request: Request) -> Response:
        """The page itself."""
        return self._answer(request, INDEX)

    async def file(self, request: Request) -> Response:
        """Answer with a file that the page loads: a script, the style sheet, the icon."""
        return self._answer(request, request.path_params["name"])

    def _answer(self, request: Request, name: str) -> Response:
        file = self._files.get(name)
        if file is None:
            return PlainTextResponse("there is no such file\n", 404)
        headers = {"ETag": file.etag, "Cache-Control": "no-cache"}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if file.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)
