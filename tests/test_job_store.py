"""The store of a job as JSON, for one process."""

import torch.distributed as dist

from expertmesh.distributed.job_store import JobStore


def test_a_value_is_taken_once_and_parts_of_a_store_do_not_meet() -> None:
    shared = dist.HashStore()
    one, other = JobStore(shared, "one/"), JobStore(shared, "other/")
    one.put("key", [1, None])
    assert (one.get("missing"), other.get("key")) == (None, None)
    assert one.get("key") == one.wait("key", 1) == [1, None]
    assert (one.take("key"), one.take("key")) == ([1, None], None)
    assert [one.count("n"), one.count("n"), other.count("n")] == [1, 2, 1]
