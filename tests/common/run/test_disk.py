import shutil
import threading
from pathlib import Path

from prefixrl.common.run.disk import held_bytes


def write_tree(folder: Path) -> None:
    (folder / "deep").mkdir(parents=True)
    for name in ("a.bin", "b.bin", "deep/c.bin"):
        (folder / name).write_bytes(b"x" * 100)


def test_the_bytes_of_a_folder_are_those_of_its_files_at_any_depth(tmp_path: Path) -> None:
    write_tree(tmp_path / "version")
    (tmp_path / "version" / "link").symlink_to(tmp_path / "version" / "a.bin")
    link_bytes = (tmp_path / "version" / "link").lstat().st_size
    assert held_bytes(tmp_path / "version") == 300 + link_bytes
    assert held_bytes(tmp_path / "absent") == 0


def test_a_folder_is_measured_while_another_process_renames_and_removes_its_files(
    tmp_path: Path,
) -> None:
    write_tree(tmp_path / "kept")
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            write_tree(tmp_path / "v1")
            (tmp_path / "v1").rename(tmp_path / "v2")
            shutil.rmtree(tmp_path / "v2")

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        actual = [held_bytes(tmp_path) for _ in range(300)]
    finally:
        done.set()
        other.join()
    assert all(300 <= each <= 900 for each in actual)
