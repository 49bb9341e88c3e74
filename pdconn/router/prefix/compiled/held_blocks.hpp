// The blocks that pods hold, by hash, plane and pod: what PythonBlocks of held_blocks.py does.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hash_slots.hpp"

namespace pdconn {

using Word = std::uint64_t;

constexpr std::size_t POD_BITS = 64;

// Zeros that take no memory until they are written: a plane with few blocks has few pages.
template <typename T>
struct ZeroPages {
    using value_type = T;
    T *allocate(std::size_t number) {
        void *zeros = std::calloc(number, sizeof(T));
        if (!zeros) throw std::bad_alloc();
        return static_cast<T *>(zeros);
    }
    void deallocate(T *zeros, std::size_t) { std::free(zeros); }
    void construct(T *) {}  // it is zero
    void construct(T *at, T value) { *at = value; }
    bool operator==(const ZeroPages &) const { return true; }
    bool operator!=(const ZeroPages &) const { return false; }
};

struct Counted {
    std::size_t done = 0;     // blocks stored or removed
    std::size_t ignored = 0;  // blocks refused, or not known to be held
};

class HeldBlocks {
public:
    std::size_t num_hashes() const { return slots_.size(); }
    std::size_t num_words() const { return num_words_; }
    bool has_plane(std::size_t plane) const { return plane < planes_.size() && planes_[plane]; }

    // Room for another 64 pods.
    void add_word() {
        for (auto &plane : planes_)
            if (plane && plane->size() == num_words_) plane->emplace_back(slots_.capacity());
        copies_.resize((num_words_ + 1) * POD_BITS, no_copies_);
        num_words_++;
    }

    // The number of a new plane.
    std::size_t add_plane() {
        Plane words;
        words.reserve(num_words_);
        while (words.size() < num_words_) words.emplace_back(slots_.capacity());
        std::size_t at = 0;
        while (at < planes_.size() && planes_[at]) at++;
        if (at == planes_.size()) planes_.emplace_back();
        planes_[at] = std::move(words);
        return at;
    }

    // Forget a plane in which no pod holds a block.
    void drop_plane(std::size_t plane) { planes_[plane].reset(); }

    Counted store(std::size_t place, std::size_t plane, const Hash *hashes, std::size_t number,
                  std::size_t room, bool counts_copies) {
        make_room(std::min(number, room));  // no more are new
        Words &words = (*planes_[plane])[place / POD_BITS];
        const Word bit = Word{1} << place % POD_BITS;
        Counted counted;
        for (std::size_t at = 0; at < number; at++) {
            prefetch(hashes, at, number, words);
            Slot slot = slots_.find(hashes[at]);
            const bool held = slot != NO_SLOT && words[slot] & bit;
            if (held) {
                if (counts_copies) add_copy(place, plane, slot);
            } else if (counted.done >= room) {
                counted.ignored++;
            } else {
                if (slot == NO_SLOT) slot = slots_.take(hashes[at]);
                words[slot] |= bit;
                slots_.hold(slot);
                counted.done++;
            }
        }
        return counted;
    }

    Counted remove(std::size_t place, std::size_t plane, const Hash *hashes, std::size_t number) {
        Words &words = (*planes_[plane])[place / POD_BITS];
        const Word bit = Word{1} << place % POD_BITS;
        Counted counted;
        for (std::size_t at = 0; at < number; at++) {
            prefetch(hashes, at, number, words);
            const Slot slot = slots_.find(hashes[at]);
            if (slot == NO_SLOT || !(words[slot] & bit)) {
                counted.ignored++;
            } else if (!take_copy(place, plane, slot)) {
                words[slot] ^= bit;
                slots_.release(slot);
                counted.done++;
            }
        }
        return counted;
    }

    // Remove all blocks of a pod; how many of each plane.
    std::vector<std::size_t> clear(std::size_t place) {
        std::vector<std::size_t> removed(planes_.size(), 0);
        const Word bit = Word{1} << place % POD_BITS;
        for (std::size_t plane = 0; plane < planes_.size(); plane++) {
            if (!planes_[plane]) continue;
            Words &words = (*planes_[plane])[place / POD_BITS];
            for (std::size_t slot = 1; slot < slots_.end(); slot++) {
                if (!(words[slot] & bit)) continue;
                words[slot] ^= bit;
                slots_.release(static_cast<Slot>(slot));
                removed[plane]++;
            }
        }
        copies_[place] = no_copies_;  // clear() would keep the memory of its table
        return removed;
    }

    // Copies of a pod's blocks beside the first of each.
    std::size_t num_copies(std::size_t place) const {
        std::size_t number = 0;
        for (const auto &one : copies_[place]) number += one.second;
        return number;
    }

    // The slots of hashes; where `leading`, of those before the first without one.  The number.
    std::size_t find(const Hash *hashes, std::size_t number, bool leading,
                     std::intptr_t *slots) const {
        for (std::size_t at = 0; at < number; at++) {
            if (at + 2 * AHEAD < number) slots_.prefetch_entry(hashes[at + 2 * AHEAD]);
            if (at + AHEAD < number) slots_.prefetch_slot(hashes[at + AHEAD]);
            const Slot slot = slots_.find(hashes[at]);
            if (leading && slot == NO_SLOT) return at;
            slots[at] = slot;
        }
        return number;
    }

    // The pods of one word that hold a block, as bits; NO_SLOT holds none.
    Word held(std::size_t plane, std::size_t word, std::size_t slot) const {
        return slot < slots_.end() ? (*planes_[plane])[word][slot] : 0;
    }

private:
    using Words = std::vector<Word, ZeroPages<Word>>;  // by slot, at least of the slots' capacity
    using Plane = std::vector<Words>;                  // by word of pods
    static constexpr std::size_t AHEAD = 8;

    // An allocation may fail: the words of planes grow first, as longer ones do no harm.
    void make_room(std::size_t number) {
        if (slots_.has_room(number)) return;
        const std::size_t capacity = slots_.capacity_for(number);
        for (auto &plane : planes_) {
            if (!plane) continue;
            for (Words &words : *plane)
                if (words.size() < capacity) words.resize(capacity);
        }
        slots_.make_room(number);
    }

    void prefetch(const Hash *hashes, std::size_t at, std::size_t number, const Words &words) const {
        if (at + 2 * AHEAD < number) slots_.prefetch_entry(hashes[at + 2 * AHEAD]);
        if (at + AHEAD < number) __builtin_prefetch(&words[slots_.prefetch_slot(hashes[at + AHEAD])], 1);
    }

    // Copies are few, and only a pod that has some pays for the search.

    struct CopyHash {
        Word multiplier;
        std::size_t operator()(Word key) const noexcept { return key * multiplier; }
    };
    using Copies = std::unordered_map<Word, std::size_t, CopyHash>;

    static Word copy_key(std::size_t plane, Slot slot) { return Word{plane} << 32 | slot; }

    void add_copy(std::size_t place, std::size_t plane, Slot slot) {
        try {
            copies_[place][copy_key(plane, slot)]++;
        } catch (const std::bad_alloc &) {
            // The block will look gone while a copy is held, which makes a hit shorter.
        }
    }

    // Whether there was a copy to take.
    bool take_copy(std::size_t place, std::size_t plane, Slot slot) {
        Copies &copies = copies_[place];
        if (copies.empty()) return false;
        const auto found = copies.find(copy_key(plane, slot));
        if (found == copies.end()) return false;
        if (--found->second == 0) copies.erase(found);
        return true;
    }

    HashSlots slots_;
    std::vector<std::optional<Plane>> planes_;
    const Copies no_copies_{0, CopyHash{random_multiplier()}};
    std::vector<Copies> copies_;
    std::size_t num_words_ = 0;
};

}  // namespace pdconn
