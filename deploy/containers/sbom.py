"""Bill of materials of an image (CycloneDX), laid into its OCI layout as what refers to the image.

sbom.py LAYOUT IMAGE ROOTFS: what Debian's and Python's package managers have in ROOTFS is named with version, licence
where its metadata give one in SPDX's terms, and package URL. It is the layout's IMAGE-sbom, whose subject is IMAGE.
"""

import hashlib
import json
import sys
import uuid
from collections.abc import Iterator
from datetime import datetime
from email.parser import HeaderParser
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

BOM = "application/vnd.cyclonedx+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
EMPTY = "application/vnd.oci.empty.v1+json"
REF = "org.opencontainers.image.ref.name"
CREATED = "org.opencontainers.image.created"


def main(layout: Path, image: str, rootfs: Path) -> None:
    """Write it, where it is valid."""
    index = json.loads((layout / "index.json").read_text())
    (subject,) = [each for each in index["manifests"] if each["annotations"][REF] == image]
    config = json.loads(blob(layout, json.loads(blob(layout, subject["digest"]))["config"]["digest"]))
    text = bom(image, subject["digest"], config, [*debian(rootfs), *python(rootfs)])
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        sys.exit(f"sbom: {error}")
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": BOM,
        "config": add(layout, b"{}", EMPTY),
        "layers": [add(layout, text.encode(), BOM)],
        "subject": {name: subject[name] for name in ("mediaType", "digest", "size")},
        "annotations": {CREATED: config["created"]},
    }
    added = add(layout, json.dumps(manifest).encode(), MANIFEST)
    index["manifests"].append({**added, "artifactType": BOM, "annotations": {REF: f"{image}-sbom"}})
    (layout / "index.json").write_text(json.dumps(index))


def bom(image: str, digest: str, config: dict[str, Any], components: list[Component]) -> str:
    """Return the document. The same image has the same one, time and serial number included."""
    found = Bom(components=components, serial_number=uuid.uuid5(uuid.NAMESPACE_OID, digest))
    found.metadata.timestamp = datetime.fromisoformat(config["created"])
    version = config["config"]["Labels"]["org.opencontainers.image.version"]
    found.metadata.component = Component(
        name=f"rollout-buffer/{image}", version=version, type=ComponentType.CONTAINER, bom_ref=digest
    )
    found.register_dependency(found.metadata.component, components)
    return JsonV1Dot6(found).output_as_string(indent=1)


def python(rootfs: Path) -> Iterator[Component]:
    """Distributions in the image's environment."""
    for each in distributions(path=[str(path) for path in rootfs.glob("opt/rollout-buffer/lib/python*/site-packages")]):
        purl = PackageURL("pypi", None, each.metadata["Name"].lower().replace("_", "-"), each.version)
        yield library(purl, each.metadata["License-Expression"])


def debian(rootfs: Path) -> Iterator[Component]:
    """Packages of the base."""
    for block in (rootfs / "var/lib/dpkg/status").read_text().strip().split("\n\n"):
        package = HeaderParser().parsestr(block)
        qualifiers = {"arch": package["Architecture"]}
        yield library(PackageURL("deb", "debian", package["Package"], package["Version"], qualifiers), None)


def library(purl: PackageURL, expression: str | None) -> Component:
    """Return the component of a package."""
    licences = [LicenseFactory().make_with_expression(expression)] if expression else []
    return Component(
        name=purl.name,
        version=purl.version,
        purl=purl,
        bom_ref=str(purl),
        type=ComponentType.LIBRARY,
        licenses=licences,
    )


def blob(layout: Path, digest: str) -> bytes:
    """Return what has this digest."""
    return (layout / "blobs" / digest.replace(":", "/")).read_bytes()


def add(layout: Path, content: bytes, kind: str) -> dict[str, Any]:
    """Put content into the layout and return its descriptor."""
    digest = hashlib.sha256(content).hexdigest()
    (layout / "blobs/sha256" / digest).write_bytes(content)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
