"""Clusters of Kubernetes: ours, and a real one too where KUBEBUILDER_ASSETS names its programs."""

from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.kube_cluster import SERVERS, ClusterAdmin, RealCluster, our_cluster


@pytest.fixture(scope="session")
def real_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    cluster = RealCluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start_etcd()
        cluster.start_api()
        yield cluster
    finally:
        cluster.stop()


@pytest_asyncio.fixture(params=SERVERS)
async def any_cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[ClusterAdmin, None]:
    if request.param == "ours":
        async with our_cluster(tmp_path) as admin:
            yield admin
    else:
        real: RealCluster = request.getfixturevalue("real_cluster")
        admin = await real.ready()
        await admin.clear()
        yield admin


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncGenerator[ClusterAdmin, None]:
    """Ours, which has faults on demand."""
    async with our_cluster(tmp_path) as admin:
        yield admin
