"""The licences that the hub knows."""

from backbones import InputError
from backbones.utils.errors import closest

# What is on no list, and is said in a file of its own.
OTHER = "other"
# In the order of docs/hub/repositories-licenses.md of huggingface/hub-docs at 242f4a1 (August 2026), which
# https://huggingface.co/docs/hub/repositories-licenses shows. No version of huggingface_hub has the list.
LICENSES = frozenset(
    """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0
    cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0
    cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0
    cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl
    gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr
    mpl-2.0 odc-by odbl openmdw-1.0 openmdw-1.1 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl
    lgpl-lr deepfloyd-if-license fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4
    grok2-community gemma unknown other
    """.split()
)


def check_license(license_id: str | None) -> None:
    """Raise an :class:`InputError` where a licence is none of the hub's ids, naming those that are nearest."""
    if license_id is not None and license_id not in LICENSES:
        near = closest(str(license_id).lower(), sorted(LICENSES), most=3)
        raise InputError(
            f"license is {license_id!r}, which is no id of the hub's list: write {OTHER} for one that is not there, "
            f"with its text in a file LICENSE beside the card{near}"
        )
