"""stub"""


def options(group):
    return dict(group)


def entry(saved, group, param):
    saved = dict(saved)
    if "fp32_copy" in saved:
        saved["master"] = saved.pop("fp32_copy")
    return saved
