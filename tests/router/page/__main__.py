"""Pictures of the live page for the documentation: ``python -m tests.router.page [SECONDS]``.

Runs the proxy over fake engines under fake clients for so long (100 by default), and writes
``docs/images/router-*.png``.  The engines' times are invented; the page and the proxy are real.
With ``--url URL`` it takes one picture of a router that is running: ``router-engines.png``.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.router.page.browser import browser
from tests.router.page.busy import traffic

IMAGES = Path(__file__).parents[3] / "docs" / "images"
MOST_NBYTES = 200 << 10


async def main(seconds: float) -> None:
    """Write the pictures."""
    with tempfile.TemporaryDirectory() as folder:
        async with traffic() as clients, browser(Path(folder)) as page:
            sending = asyncio.create_task(clients.send(int(seconds * clients.rate)))
            await asyncio.sleep(seconds * 0.9)
            url = clients.fleet.proxy.admin_url
            for name, width, height, dark, top in (
                ("router-light", 1400, 1130, False, None),
                ("router-dark", 1400, 700, True, "waterfall-title"),
                ("router-phone", 400, 1000, False, None),
            ):
                await page.show(width, height, dark=dark)
                await page.open(url)
                await page.until("document.querySelectorAll('#decisions tr').length > 5")
                await page.until("document.querySelectorAll('.plot path').length > 8")
                await asyncio.sleep(2.5)
                if top is not None:
                    await page.value(
                        f"scrollTo(0, document.getElementById('{top}').offsetTop - 20)"
                    )
                _write(name, await page.picture(whole=False))
                assert page.complaints == [], page.complaints
            await sending


async def main_of(url: str) -> None:
    """Write a picture of a router that is running."""
    with tempfile.TemporaryDirectory() as folder:
        async with browser(Path(folder)) as page:
            await page.show(1400, 1130)
            await page.open(url)
            await page.until("document.querySelectorAll('#decisions tr').length > 5")
            await page.until("document.querySelectorAll('.plot path').length > 4")
            await asyncio.sleep(2.5)
            _write("router-engines", await page.picture(whole=False))
            assert page.complaints == [], page.complaints


def _write(name: str, png: bytes) -> None:
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / f"{name}.png").write_bytes(png)
    print(f"{name}.png: {len(png) >> 10} KiB")
    assert len(png) <= MOST_NBYTES, f"{name}: at most {MOST_NBYTES >> 10} KiB"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--url"]:
        asyncio.run(main_of(sys.argv[2]))
    else:
        asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else 100.0))
