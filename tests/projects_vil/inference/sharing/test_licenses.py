"""Licences as the hub names them."""

import pytest

from backbones import InputError
from projects_vil.inference.sharing.licenses import LICENSES, check_license


def test_those_of_the_hubs_list():
    """docs/hub/repositories-licenses.md of huggingface/hub-docs at 242f4a1: 83 of them, with a "+" in one."""
    assert len(LICENSES) == 83
    assert {"apache-2.0", "cc-by-nc-sa-4.0", "openrail++", "lppl-1.3c", "llama3.3", "unknown", "other"} < LICENSES
    for license_id in (*LICENSES, None):
        check_license(license_id)


@pytest.mark.parametrize(
    "license_id, near",
    [
        ("Apache-2.0", "'apache-2.0' or "),
        ("cc-by-4", "'cc-by-4.0' or "),
        ("GPL3", "'gpl-3.0'"),
        ("my-own-licence", ""),
        ("", ""),
        ("a\nb", ""),
        (5, ""),
    ],
)
def test_a_licence_that_is_no_id(license_id, near, detector):
    with pytest.raises(InputError) as caught:
        check_license(license_id)
    text = str(caught.value)
    assert text.startswith(f"license is {license_id!r}, which is no id of the hub's list: write other for one that is")
    assert near in text and "\n" not in text
    with pytest.raises(InputError, match="no id of the hub's list"):
        detector.generate_model_card(license=license_id)
