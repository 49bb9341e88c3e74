// Slots of block hashes: a hash that some pod holds has one, and keeps it until no pod holds it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

namespace pdconn {

using Hash = std::uint64_t;
using Slot = std::uint32_t;

constexpr Slot NO_SLOT = 0;

// Odd, for a table that multiplies its keys by it: who sends hashes can't choose ones that share an
// entry.
inline Hash random_multiplier() {
    std::random_device random;
    return (Hash{random()} << 32 | random()) | 1;
}

// An open-addressing table of slots.  The hash of a slot stands in `hashes`, so that an entry
// takes four bytes; a search compares the hashes of the slots that it meets.
class HashSlots {
public:
    HashSlots() : hashes_{0}, holders_{0}, table_(FIRST_SIZE, NO_SLOT) { reserve_slots(FIRST_SLOTS); }

    // Hashes that have a slot.
    std::size_t size() const { return hashes_.size() - 1 - free_.size(); }

    // All slots are below this, used or free; arrays by slot have `capacity` elements.
    std::size_t end() const { return hashes_.size(); }
    std::size_t capacity() const { return capacity_; }

    Slot find(Hash hash) const {
        for (std::size_t at = home(hash);; at = (at + 1) & mask()) {
            const Slot slot = table_[at];
            if (slot == NO_SLOT || hashes_[slot] == hash) return slot;
        }
    }

    // Whether another `number` hashes find room without an allocation.
    bool has_room(std::size_t number) const {
        return free_.size() + (capacity_ - hashes_.size()) >= number &&
               (size() + number) * 8 <= table_.size() * 5;
    }

    // The capacity at which another `number` hashes find slots.
    std::size_t capacity_for(std::size_t number) const {
        std::size_t capacity = capacity_;
        while (free_.size() + (capacity - hashes_.size()) < number) capacity *= 2;
        if (capacity > MOST_SLOTS) throw std::length_error("more block hashes than slots");
        return capacity;
    }

    // Make room for another `number` hashes.  If it throws, everything is as before.
    void make_room(std::size_t number) {
        const std::size_t capacity = capacity_for(number);
        if (capacity != capacity_) reserve_slots(capacity);
        std::size_t entries = table_.size();
        while ((size() + number) * 8 > entries * 5) entries *= 2;
        if (entries != table_.size()) rebuild(entries);
    }

    // A slot for a hash that has none; needs room.  Does not throw.
    Slot take(Hash hash) {
        Slot slot;
        if (free_.empty()) {
            slot = static_cast<Slot>(hashes_.size());
            hashes_.push_back(hash);
            holders_.push_back(0);
        } else {
            slot = free_.back();
            free_.pop_back();
            hashes_[slot] = hash;
        }
        std::size_t at = home(hash);
        while (table_[at] != NO_SLOT) at = (at + 1) & mask();
        table_[at] = slot;
        return slot;
    }

    // Pods and planes that hold a slot's hash; with the last one the slot is free.  Do not throw.
    void hold(Slot slot) { holders_[slot]++; }
    void release(Slot slot) {
        if (--holders_[slot] == 0) erase(slot);
    }

    // The first bring a search's memory into the cache; the second needs what the first brought.
    void prefetch_entry(Hash hash) const { __builtin_prefetch(&table_[home(hash)]); }
    Slot prefetch_slot(Hash hash) const {
        const Slot slot = table_[home(hash)];
        __builtin_prefetch(&hashes_[slot]);
        __builtin_prefetch(&holders_[slot], 1);
        return slot;
    }

private:
    static constexpr std::size_t FIRST_SIZE = 2048, FIRST_SLOTS = 1024;
    static constexpr std::size_t MOST_SLOTS = std::size_t{1} << 32;

    std::size_t mask() const { return table_.size() - 1; }
    std::size_t home(Hash hash) const { return (hash * multiplier_) >> shift_; }

    void reserve_slots(std::size_t number) {
        hashes_.reserve(number);
        holders_.reserve(number);
        free_.reserve(number);
        capacity_ = number;
    }

    void rebuild(std::size_t entries) {
        std::vector<Slot> old(entries, NO_SLOT);
        old.swap(table_);
        shift_ = 64 - __builtin_ctzll(entries);
        for (const Slot slot : old) {
            if (slot == NO_SLOT) continue;
            std::size_t at = home(hashes_[slot]);
            while (table_[at] != NO_SLOT) at = (at + 1) & mask();
            table_[at] = slot;
        }
    }

    // Later entries move into the gap where their search begins at or before it, so that no search
    // ends too early.
    void erase(Slot slot) {
        std::size_t gap = home(hashes_[slot]);
        while (table_[gap] != slot) gap = (gap + 1) & mask();
        for (std::size_t at = (gap + 1) & mask(); table_[at] != NO_SLOT; at = (at + 1) & mask()) {
            const std::size_t begin = home(hashes_[table_[at]]);
            if (((at - begin) & mask()) >= ((at - gap) & mask())) {
                table_[gap] = table_[at];
                gap = at;
            }
        }
        table_[gap] = NO_SLOT;
        free_.push_back(slot);
    }

    std::vector<Hash> hashes_;
    std::vector<std::uint32_t> holders_;
    std::vector<Slot> free_;
    std::vector<Slot> table_;
    std::size_t capacity_ = 0;
    int shift_ = 64 - __builtin_ctzll(FIRST_SIZE);
    Hash multiplier_ = random_multiplier();
};

}  // namespace pdconn
