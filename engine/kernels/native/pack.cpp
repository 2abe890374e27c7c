// From the blocks of a GGUF file, or from numbers, into panels (panels.h).
#include "panels.h"

namespace baton {
namespace {

// From the blocks of a GGUF file. Layouts: ggml's block_q4_0 (d, 16 bytes: low nibbles k 0-15, high 16-31), block_q4_1
// (d, m, the same), block_q8_0 (d, 32 int8).
template <int BLOCK_BYTES, int GROUP_BYTES, class Put>
void pack(const uint8_t* blocks, int64_t num_rows, int64_t num_k, uint8_t* panels, Put put) {
    const int64_t num_groups = num_k / GROUP, num_panels = (num_rows + PANEL - 1) / PANEL;
    std::memset(panels, 0, num_panels * num_groups * GROUP_BYTES);
    for (int64_t row = 0; row < num_rows; row++) {
        uint8_t* panel = panels + row / PANEL * num_groups * GROUP_BYTES;
        for (int64_t g = 0; g < num_groups; g++)
            put(blocks + (row * num_groups + g) * BLOCK_BYTES, panel + g * GROUP_BYTES, row % PANEL);
    }
}

void put_half(uint8_t* group, int64_t index, const uint8_t* from) { std::memcpy(group + 2 * index, from, 2); }

void put_nibbles(uint8_t* words, int64_t lane, const uint8_t* packed) {
    for (int j = 0; j < 4; j++) {
        uint32_t word = 0;
        for (int i = 0; i < 8; i++) {
            const int k = 8 * j + i;
            const uint32_t nibble = k < 16 ? packed[k] & 15 : packed[k - 16] >> 4;
            word |= nibble << (4 * i);
        }
        std::memcpy(words + (j * PANEL + lane) * 4, &word, 4);
    }
}

// From rows of numbers; panels has been zeroed. Neighbouring k, so many as `at_once`, lie beside each other.
template <class T>
void pack_numbers(const T* weights, int64_t num_rows, int64_t num_k, int64_t padded_k, int64_t at_once, T* panels) {
    for (int64_t row = 0; row < num_rows; row++) {
        T* column = panels + row / PANEL * padded_k * PANEL + row % PANEL * at_once;
        for (int64_t k = 0; k < num_k; k++)
            column[k / at_once * at_once * PANEL + k % at_once] = weights[row * num_k + k];
    }
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" {

int64_t baton_panel_bytes(int kind, int64_t num_rows, int64_t num_k) {
    return (num_rows + PANEL - 1) / PANEL * (num_k / GROUP) * group_bytes(kind);
}

void baton_pack(int kind, const uint8_t* blocks, int64_t num_rows, int64_t num_k, uint8_t* panels) {
    if (kind == INT8)
        pack<34, group_bytes(INT8)>(blocks, num_rows, num_k, panels, [](const uint8_t* b, uint8_t* g, int64_t lane) {
            put_half(g, lane, b);
            for (int k = 0; k < GROUP; k++) g[2 * PANEL + k * PANEL + lane] = b[2 + k];
        });
    else if (kind == INT4)
        pack<18, group_bytes(INT4)>(blocks, num_rows, num_k, panels, [](const uint8_t* b, uint8_t* g, int64_t lane) {
            put_half(g, lane, b);
            put_nibbles(g + 2 * PANEL, lane, b + 2);
        });
    else
        pack<20, group_bytes(INT4M)>(blocks, num_rows, num_k, panels, [](const uint8_t* b, uint8_t* g, int64_t lane) {
            put_half(g, lane, b);
            put_half(g, PANEL + lane, b + 2);
            put_nibbles(g + 4 * PANEL, lane, b + 4);
        });
}

// weights [num_rows, num_k] of float or bf16 -> panels of padded_k inputs.
void baton_pack_numbers(int kind, const void* weights, int64_t num_rows, int64_t num_k, int64_t padded_k, void* panels) {
    std::memset(panels, 0, baton_panel_bytes(kind, num_rows, padded_k));
    if (kind == FLOATS)
        pack_numbers((const float*)weights, num_rows, num_k, padded_k, 1, (float*)panels);
    else
        pack_numbers((const bf16*)weights, num_rows, num_k, padded_k, 2, (bf16*)panels);
}

}  // extern "C"
