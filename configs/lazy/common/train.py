"""How a run goes; lengths are in iterations, of an epoch of COCO where the paper says one."""

train = dict(
    output_dir="./output",
    init_checkpoint="",  # a pretrained backbone, or a detector with --eval-only
    max_iter=90000,
    seed=-1,
    device="cuda",
    amp=dict(enabled=False),
    ddp=dict(broadcast_buffers=False, find_unused_parameters=False),
    clip_norm=1.0,  # of all gradients together, ViL A.2; 0 for none
    checkpointer=dict(period=7330, max_to_keep=None),
    eval_period=7330,
    log_period=20,
    feature_redraw_period=1000,  # of Performer's random features
    random_shift_until=0.0,  # the share of max_iter in which ViL's local attention sees one neighbouring chunk
)
