// Copyright: The volta.llm authors
// GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
//
// A backend for llama.cpp that has GPUs without having any: it takes every buffer, stores nothing and computes nothing.
// With it the real engine places real layers, sizes real caches and reserves real graphs, and says how large each buffer
// would be, so that the memory plan is checked against the engine on a machine without a GPU.
//
// What of the CUDA backend decides over buffer sizes is followed (llama.cpp 0.5.0-dev, ggml/src/ggml-cuda):
// alignment and row padding (ggml-cuda.cu:897-920), half precision copies of a quantised KV cache for the matrix
// kernels of flash attention (fattn.cu:722, fattn-common.cuh:53), events and asynchronous copies, which switch pipeline
// parallelism on (ggml-cuda.cu:5123), lifetimes that fused mixture-of-experts nodes extend (ggml-cuda.cu:4522).
//
// Build:  g++ -O1 -shared -fPIC -std=c++17 -I LC/ggml/include -I LC/ggml/src null_backend.cpp -o libnull.so
//         -L BUILD/bin -lggml-base -lggml-cpu
// Use:    GGML_BACKEND_PATH=libnull.so NULL_DEVICES=4 NULL_MIB=32768 llama-server --no-warmup -lv 4 ...

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

struct device_context {
    int         index;
    std::string name;
    size_t      memory;
};

size_t number(const char * variable, size_t otherwise) {
    const char * text = std::getenv(variable);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

// --- flash attention: which kernel, and what it needs beside its result -----------------------------------------------

enum class kernel { none, vector, tile, matrix };

bool cache_type_supported(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32: case GGML_TYPE_F16: case GGML_TYPE_BF16: case GGML_TYPE_Q4_0: case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_0: case GGML_TYPE_Q5_1: case GGML_TYPE_Q8_0:
            return true;
        default:
            return false;
    }
}

kernel flash_attention_kernel(const ggml_tensor * op) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    const int64_t ratio = q->ne[2] / k->ne[2];
    const bool grouped = ratio >= 2 && mask && k->ne[1] % 256 == 0;
    switch (k->ne[0]) {
        case 40: case 64: case 72: case 80: case 96: case 112: case 128: case 256:
            if (v->ne[0] != k->ne[0]) { return kernel::none; }
            break;
        case 192: if (v->ne[0] != 128 || !grouped || ratio % 8) { return kernel::none; } break;
        case 320: if (v->ne[0] != 256 || !grouped || ratio % 32) { return kernel::none; } break;
        case 512: if (v->ne[0] != 512 || !grouped) { return kernel::none; } break;
        case 576: if (v->ne[0] != 512 || !grouped) { return kernel::none; } break;
        default: return kernel::none;
    }
    if (!cache_type_supported(k->type) || !cache_type_supported(v->type) || (mask && mask->ne[2] != 1)) {
        return kernel::none;
    }
    const bool vector = q->ne[0] <= 256 && q->ne[0] % 64 == 0 && q->ne[0] != 192 && k->ne[1] % 256 == 0;
    const bool quantised = ggml_is_quantized(k->type) || ggml_is_quantized(v->type);
    if (number("NULL_CC", 700) >= 750) {
        if (vector && quantised && q->ne[1] <= (number("NULL_CC", 700) >= 890 ? 2 : 1)) { return kernel::vector; }
        if (vector && !grouped && q->ne[1] == 1) { return kernel::vector; }
        return kernel::matrix;
    }
    int64_t effective = 1;
    while (ratio % (2 * effective) == 0 && effective < 8) { effective *= 2; }
    if (vector && q->ne[1] * effective <= 2) { return kernel::vector; }
    return q->ne[1] * effective <= 16 ? kernel::tile : kernel::matrix;
}

size_t flash_attention_size(const ggml_tensor * op) {
    const ggml_tensor *k = op->src[1], *v = op->src[2];
    size_t end = ggml_nbytes(op);
    const kernel chosen = flash_attention_kernel(op);
    if (chosen != kernel::tile && chosen != kernel::matrix) { return end; }
    const bool view = v->view_src && (v->view_src == k || (v->view_src == k->view_src && v->view_offs == k->view_offs));
    if (k->type != GGML_TYPE_F16) { end = GGML_PAD(end, 128) + ggml_nelements(k) * 2; }
    if (v->type != GGML_TYPE_F16 && !view) { end = GGML_PAD(end, 128) + ggml_nelements(v) * 2; }
    return end;
}

// --- buffers ----------------------------------------------------------------------------------------------------------

const char * buft_name(ggml_backend_buffer_type_t buft) {
    return static_cast<device_context *>(buft->device->context)->name.c_str();
}
size_t buft_alignment(ggml_backend_buffer_type_t) { return 128; }
size_t buft_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    size_t size = tensor->op == GGML_OP_FLASH_ATTN_EXT ? flash_attention_size(tensor) : ggml_nbytes(tensor);
    if (ggml_is_quantized(tensor->type) && tensor->ne[0] % 512) {
        size += ggml_row_size(tensor->type, 512 - tensor->ne[0] % 512);
    }
    return size;
}

// An address that no one reads: the engine only computes with it.
void * buffer_base(ggml_backend_buffer_t) { return reinterpret_cast<void *>(0x100000000000ull); }
ggml_status buffer_init_tensor(ggml_backend_buffer_t, ggml_tensor *) { return GGML_STATUS_SUCCESS; }
void buffer_memset(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {}
void buffer_set(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) {}
void buffer_get(ggml_backend_buffer_t, const ggml_tensor *, void * data, size_t, size_t size) { std::memset(data, 0, size); }
bool buffer_copy(ggml_backend_buffer_t, const ggml_tensor *, ggml_tensor *) { return true; }
void buffer_clear(ggml_backend_buffer_t, uint8_t) {}

const ggml_backend_buffer_i buffer_interface = {
    /* .free_buffer = */ nullptr, /* .get_base = */ buffer_base, /* .init_tensor = */ buffer_init_tensor,
    /* .memset_tensor = */ buffer_memset, /* .set_tensor = */ buffer_set, /* .get_tensor = */ buffer_get,
    /* .set_tensor_2d = */ nullptr, /* .get_tensor_2d = */ nullptr, /* .cpy_tensor = */ buffer_copy,
    /* .clear = */ buffer_clear, /* .reset = */ nullptr,
};

ggml_backend_buffer_t buft_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    return ggml_backend_buffer_init(buft, buffer_interface, nullptr, size);
}

const char * host_name(ggml_backend_buffer_type_t) { return "NULL_Host"; }
ggml_backend_buffer_t host_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    buffer->buft = buft;
    return buffer;
}
size_t host_alignment(ggml_backend_buffer_type_t) { return 64; }
bool host_is_host(ggml_backend_buffer_type_t) { return true; }

// --- backend ----------------------------------------------------------------------------------------------------------

const char * backend_name(ggml_backend_t backend) { return static_cast<device_context *>(backend->context)->name.c_str(); }
void backend_free(ggml_backend_t backend) { delete backend; }
void backend_set(ggml_backend_t, ggml_tensor *, const void *, size_t, size_t) {}
void backend_get(ggml_backend_t, const ggml_tensor *, void * data, size_t, size_t size) { std::memset(data, 0, size); }
bool backend_copy(ggml_backend_t, ggml_backend_t, const ggml_tensor *, ggml_tensor *) { return true; }
void backend_synchronize(ggml_backend_t) {}
ggml_status backend_compute(ggml_backend_t, ggml_cgraph *) { return GGML_STATUS_SUCCESS; }
void backend_event(ggml_backend_t, ggml_backend_event_t) {}

bool ops_follow(ggml_cgraph * graph, int at, const std::vector<ggml_op> & ops) {
    if (at + (int) ops.size() > ggml_graph_n_nodes(graph)) { return false; }
    for (size_t i = 0; i < ops.size(); i++) {
        if (ggml_graph_node(graph, at + (int) i)->op != ops[i]) { return false; }
    }
    return true;
}

// Nodes that the CUDA backend fuses keep their inputs alive to the end of the fusion.
void backend_optimise(ggml_backend_t, ggml_cgraph * graph, ggml_backend_graph_optimize_params * params) {
    const int n = ggml_graph_n_nodes(graph);
    for (int i = 0; i < n; i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        // experts * router weight, then as many views and additions as there are experts
        if (node->op == GGML_OP_MUL && node->src[1]->ne[0] == 1 && node->ne[1] >= 2 && node->ne[1] <= 16 &&
                node->src[1]->ne[1] == node->ne[1] && node->src[1]->ne[2] == node->ne[2]) {
            const int last = i + 2 * (int) node->ne[1] - 1;
            bool match = last < n;
            for (int j = i + 1; match && j <= last; j++) {
                const ggml_op op = ggml_graph_node(graph, j)->op;
                match = op == GGML_OP_VIEW || op == GGML_OP_ADD;
            }
            if (match) {
                params->add_alloc_dep(params->user_data, node->src[0], ggml_graph_node(graph, last));
                params->add_alloc_dep(params->user_data, node->src[1], ggml_graph_node(graph, last));
                i = last;
                continue;
            }
        }
        if (node->op != GGML_OP_SOFT_MAX && node->op != GGML_OP_UNARY) { continue; }
        std::vector<ggml_op> ops = { node->op, GGML_OP_RESHAPE };
        if (ops_follow(graph, i + 2, { GGML_OP_ADD })) { ops.push_back(GGML_OP_ADD); }
        ops.insert(ops.end(), { GGML_OP_ARGSORT, GGML_OP_VIEW, GGML_OP_GET_ROWS });
        if (!ops_follow(graph, i, ops) || node->ne[0] > 1024) { continue; }
        const std::vector<ggml_op> norm = { GGML_OP_RESHAPE, GGML_OP_SUM_ROWS, GGML_OP_CLAMP, GGML_OP_DIV, GGML_OP_RESHAPE };
        if (ops_follow(graph, i + (int) ops.size(), norm)) { ops.insert(ops.end(), norm.begin(), norm.end()); }
        if (ops_follow(graph, i + (int) ops.size(), { GGML_OP_SCALE })) { ops.push_back(GGML_OP_SCALE); }
        const int last = i + (int) ops.size();
        if (last >= n) { continue; }
        for (int j = i; j < last; j++) {
            ggml_tensor * kept = ggml_graph_node(graph, j);
            params->add_alloc_dep(params->user_data, kept, ggml_graph_node(graph, last));
            for (ggml_tensor * source : kept->src) {
                if (source) { params->add_alloc_dep(params->user_data, source, ggml_graph_node(graph, last)); }
            }
        }
        i = last - 1;
    }
}

ggml_guid guid = { 0x76, 0x6f, 0x6c, 0x74, 0x61, 0x6c, 0x6c, 0x6d, 0x6e, 0x75, 0x6c, 0x6c, 0, 0, 0, 1 };

// --- device -----------------------------------------------------------------------------------------------------------

device_context * context(ggml_backend_dev_t device) { return static_cast<device_context *>(device->context); }
const char * device_name(ggml_backend_dev_t device) { return context(device)->name.c_str(); }
void device_memory(ggml_backend_dev_t device, size_t * free, size_t * total) { *free = *total = context(device)->memory; }
enum ggml_backend_dev_type device_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

void device_props(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    std::memset(props, 0, sizeof(*props));
    props->name = props->description = device_name(device);
    props->type = GGML_BACKEND_DEVICE_TYPE_GPU;
    device_memory(device, &props->memory_free, &props->memory_total);
    props->caps.async = props->caps.host_buffer = props->caps.events = props->caps.mmap_support = true;
}

ggml_backend_t device_init(ggml_backend_dev_t device, const char *) {
    ggml_backend_i interface = {};
    interface.get_name         = backend_name;
    interface.free             = backend_free;
    interface.set_tensor_async = backend_set;
    interface.get_tensor_async = backend_get;
    interface.cpy_tensor_async = backend_copy;
    interface.synchronize      = backend_synchronize;
    interface.graph_compute    = backend_compute;
    interface.event_record     = backend_event;
    interface.event_wait       = backend_event;
    interface.graph_optimize   = backend_optimise;
    return new ggml_backend{ &guid, interface, device, device->context };
}

std::vector<ggml_backend_device> devices;
std::vector<ggml_backend_buffer_type> buffer_types;
ggml_backend_buffer_type host_type;

ggml_backend_buffer_type_t device_buft(ggml_backend_dev_t device) { return &buffer_types[context(device)->index]; }
ggml_backend_buffer_type_t device_host_buft(ggml_backend_dev_t) { return &host_type; }

bool device_supports_op(ggml_backend_dev_t device, const ggml_tensor * op) {
    for (const ggml_tensor * source : op->src) {
        if (source && source->buffer && source->buffer->buft->iface.get_name == buft_name && source->buffer->buft->device != device) {
            return false;
        }
    }
    if (op->op == GGML_OP_FLASH_ATTN_EXT) { return flash_attention_kernel(op) != kernel::none; }
    if (op->op == GGML_OP_GET_ROWS && (op->src[0]->type == GGML_TYPE_IQ4_NL || op->src[0]->type == GGML_TYPE_MXFP4)) {
        return op->src[0]->ne[0] % 256 == 0;
    }
    return true;
}
bool device_supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t buft) {
    return buft->iface.get_name == buft_name && buft->device == device;
}
bool device_offload_op(ggml_backend_dev_t, const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_GET_ROWS: return false;
        case GGML_OP_MUL_MAT: return op->ne[1] >= 32;
        case GGML_OP_MUL_MAT_ID: case GGML_OP_ROPE: case GGML_OP_ROPE_BACK: return op->ne[2] >= 32;
        default: return ggml_nrows(op) >= 32;
    }
}
ggml_backend_event_t device_event_new(ggml_backend_dev_t device) { return new ggml_backend_event{ device, nullptr }; }
void device_event_free(ggml_backend_dev_t, ggml_backend_event_t event) { delete event; }
void device_event_synchronize(ggml_backend_dev_t, ggml_backend_event_t) {}

const char * reg_name(ggml_backend_reg_t) { return "NULL"; }
size_t reg_count(ggml_backend_reg_t) { return devices.size(); }
ggml_backend_dev_t reg_device(ggml_backend_reg_t, size_t index) { return &devices[index]; }
void * reg_address(ggml_backend_reg_t, const char *) { return nullptr; }

ggml_backend_reg registration = { GGML_BACKEND_API_VERSION, { reg_name, reg_count, reg_device, reg_address }, nullptr };

}  // namespace

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    if (!devices.empty()) { return &registration; }
    const size_t count = number("NULL_DEVICES", 4);
    devices.resize(count);
    buffer_types.resize(count);
    for (size_t i = 0; i < count; i++) {
        auto * own = new device_context{ (int) i, "NULL" + std::to_string(i), number("NULL_MIB", 32768) << 20 };
        ggml_backend_device & device = devices[i];
        device = {};
        device.iface.get_name          = device_name;
        device.iface.get_description   = device_name;
        device.iface.get_memory        = device_memory;
        device.iface.get_type          = device_type;
        device.iface.get_props         = device_props;
        device.iface.init_backend      = device_init;
        device.iface.get_buffer_type   = device_buft;
        device.iface.get_host_buffer_type = device_host_buft;
        device.iface.supports_op       = device_supports_op;
        device.iface.supports_buft     = device_supports_buft;
        device.iface.offload_op        = device_offload_op;
        device.iface.event_new         = device_event_new;
        device.iface.event_free        = device_event_free;
        device.iface.event_synchronize = device_event_synchronize;
        device.reg     = &registration;
        device.context = own;
        buffer_types[i] = { { buft_name, buft_alloc, buft_alignment, nullptr, buft_alloc_size, nullptr }, &device, nullptr };
    }
    host_type = { { host_name, host_alloc, host_alignment, nullptr, nullptr, host_is_host }, &devices[0], nullptr };
    return &registration;
}
