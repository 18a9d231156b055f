// Copyright: The volta.llm authors
// GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
//
// What CUB's segmented sorts want as temporary storage for the pieces that the engine sorts (plan.py, SORT_ARRAYS), in
// MiB beside the size of one array of the piece. Needs a GPU; sorts nothing.
//
//     nvcc -O1 -arch=native -o sort_storage tests/bench/plan/sort_storage.cu && ./sort_storage

#include <cub/cub.cuh>

#include <cstdio>

int main() {
    const int shapes[][2] = {{1280, 512}, {4096, 2048}, {4352, 2048}, {32768, 512}, {131072, 128}, {262144, 64}};
    const double mib = 1024.0 * 1024.0;
    bool failed = false;
    for (const auto & shape : shapes) {
        const int columns = shape[0], rows = shape[1], items = columns * rows;
        float *keys = nullptr, *sorted_keys = nullptr;
        int *values = nullptr, *sorted_values = nullptr, *bounds = nullptr;
        size_t segmented = 0, radix = 0;
        failed |= cub::DeviceSegmentedSort::SortPairsDescending(
            nullptr, segmented, keys, sorted_keys, values, sorted_values, items, rows, bounds, bounds + 1) != cudaSuccess;
        failed |= cub::DeviceSegmentedRadixSort::SortPairsDescending(
            nullptr, radix, keys, sorted_keys, values, sorted_values, items, rows, bounds, bounds + 1) != cudaSuccess;
        std::printf("%d cells x %d rows: array %.3f, segmented sort %.3f, segmented radix sort %.3f\n", columns, rows,
                    items * sizeof(int) / mib, segmented / mib, radix / mib);
    }
    return failed;
}
