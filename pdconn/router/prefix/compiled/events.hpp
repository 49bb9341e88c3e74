// Decodes a batch of KV events: what decode_batch of kv_events.py does with one that is as vLLM
// writes it.  Whatever else it meets it leaves to Python, which knows what is an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "msgpack.hpp"

namespace pdconn {

constexpr std::uint64_t MAX_EVENTS = 1'000'000;
constexpr std::uint64_t MAX_GROUP = 127;
constexpr std::uint64_t MAX_BLOCK_TOKENS = 1 << 24;
constexpr int MAX_DEPTH = 16;

enum class Type { STORED, REMOVED, CLEARED };

using Text = std::optional<std::string_view>;
using Number = std::optional<std::uint64_t>;

// An event; its hashes are those of the batch from `begin` on.
struct SentEvent {
    Type type{};
    std::size_t begin = 0, number = 0;
    Number group, window, parent;
    std::uint64_t block_tokens = 0;
    Text medium, locality, kind, lora;
    std::string_view token_ids, extra_keys;  // as encoded; empty for none
};

struct SentBatch {
    double ts = 0;
    Number rank;
    std::vector<SentEvent> events;
    std::vector<std::uint64_t> hashes;
};

// The names of fields are vLLM's; of an event that is an array, the places are these too.
enum Field {
    BLOCK_HASHES, PARENT_BLOCK_HASH, TOKEN_IDS, BLOCK_SIZE, LORA_ID, MEDIUM, LORA_NAME, EXTRA_KEYS,
    GROUP_IDX, KV_CACHE_SPEC_KIND, KV_CACHE_SPEC_SLIDING_WINDOW, LOCALITY, NUM_FIELDS
};
constexpr std::string_view FIELD_NAMES[NUM_FIELDS] = {
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
    "locality",
};
constexpr Field REMOVED_FIELDS[] = {BLOCK_HASHES, MEDIUM, GROUP_IDX, LOCALITY};
constexpr unsigned STORED_NEEDS =
    1u << BLOCK_HASHES | 1u << PARENT_BLOCK_HASH | 1u << TOKEN_IDS | 1u << BLOCK_SIZE;
constexpr unsigned REMOVED_NEEDS = 1u << BLOCK_HASHES;

class EventDecoder {
public:
    EventDecoder(std::string_view payload, SentBatch &batch)
        : in_(payload.data(), payload.size()), batch_(batch) {}

    // Whether all of the payload was understood.
    bool decode() {
        std::uint64_t length, number;
        if (!in_.array(length) || length < 2 || !in_.double_float(batch_.ts)) return false;
        if (!in_.array(number) || number > MAX_EVENTS) return false;
        const bool are_maps = in_.begins_map();
        for (; number; number--) {
            if (in_.begins_map() != are_maps) return false;
            SentEvent event;
            event.begin = batch_.hashes.size();
            if (!(are_maps ? map_event(event) : row_event(event))) return false;
            event.number = batch_.hashes.size() - event.begin;
            append(event);
        }
        if (length > 2 && !optional_number(batch_.rank)) return false;
        return (length <= 3 || in_.skip_each(length - 3, MAX_DEPTH)) && in_.is_at_end();
    }

private:
    // Removals in a row from one group and medium are one event, as vLLM reports each block alone.
    void append(const SentEvent &event) {
        if (event.type == Type::REMOVED && !batch_.events.empty()) {
            SentEvent &last = batch_.events.back();
            if (last.type == Type::REMOVED && last.group == event.group &&
                last.medium == event.medium && last.locality == event.locality) {
                last.number += event.number;
                return;
            }
        }
        batch_.events.push_back(event);
    }

    bool map_event(SentEvent &event) {
        std::uint64_t length;
        std::string_view key;
        if (!in_.map(length) || !length || !in_.ascii(key) || key != "type") return false;
        if (!type_of(event)) return false;
        unsigned seen = 0;
        for (length--; length; length--) {
            if (!in_.ascii(key) || key == "type") return false;
            int field = 0;
            while (field < NUM_FIELDS && FIELD_NAMES[field] != key) field++;
            const bool is_known = field < NUM_FIELDS && event.type != Type::CLEARED;
            if (is_known && seen & 1u << field) return false;
            if (is_known) seen |= 1u << field;
            if (!(is_known ? field_of(static_cast<Field>(field), event) : in_.skip(MAX_DEPTH)))
                return false;
        }
        return has_all(event.type, seen);
    }

    bool row_event(SentEvent &event) {
        std::uint64_t length;
        if (!in_.array(length) || !length || !type_of(event)) return false;
        const bool is_stored = event.type == Type::STORED;
        const std::uint64_t known = is_stored ? NUM_FIELDS : event.type == Type::REMOVED ? 4 : 0;
        unsigned seen = 0;
        for (std::uint64_t place = 0; place < length - 1; place++) {
            if (place >= known) {
                if (!in_.skip(MAX_DEPTH)) return false;
                continue;
            }
            const Field field = is_stored ? static_cast<Field>(place) : REMOVED_FIELDS[place];
            seen |= 1u << field;
            if (!field_of(field, event)) return false;
        }
        return has_all(event.type, seen);
    }

    bool type_of(SentEvent &event) {
        std::string_view name;
        if (!in_.ascii(name)) return false;
        if (name == "BlockStored") event.type = Type::STORED;
        else if (name == "BlockRemoved") event.type = Type::REMOVED;
        else if (name == "AllBlocksCleared") event.type = Type::CLEARED;
        else return false;
        return true;
    }

    static bool has_all(Type type, unsigned seen) {
        const unsigned needs =
            type == Type::STORED ? STORED_NEEDS : type == Type::REMOVED ? REMOVED_NEEDS : 0;
        return (seen & needs) == needs;
    }

    bool field_of(Field field, SentEvent &event) {
        switch (field) {
            case BLOCK_HASHES: return hashes();
            case PARENT_BLOCK_HASH:
                if (in_.nil()) return true;
                return hash(event.parent.emplace());
            case TOKEN_IDS: return encoded_array(event.token_ids, 0);
            case BLOCK_SIZE:
                return in_.unsigned_integer(event.block_tokens) && event.block_tokens >= 1 &&
                       event.block_tokens <= MAX_BLOCK_TOKENS;
            case LORA_ID: return in_.skip(MAX_DEPTH);
            case MEDIUM: return optional_text(event.medium);
            case LORA_NAME: return optional_text(event.lora);
            case EXTRA_KEYS: return encoded_array(event.extra_keys, MAX_DEPTH);
            case GROUP_IDX: return optional_number(event.group) && event.group.value_or(0) <= MAX_GROUP;
            case KV_CACHE_SPEC_KIND: return optional_text(event.kind);
            case KV_CACHE_SPEC_SLIDING_WINDOW: return optional_number(event.window);
            case LOCALITY: return optional_text(event.locality);
            default: return false;
        }
    }

    bool hashes() {
        std::uint64_t number;
        if (!in_.array(number) || number > MAX_EVENTS || number > in_.left()) return false;
        const std::size_t begin = batch_.hashes.size();
        batch_.hashes.resize(begin + number);
        for (std::size_t at = begin; at < batch_.hashes.size(); at++)
            if (!hash(batch_.hashes[at])) return false;
        return true;
    }

    // The low 64 bits of an integer, or of at least 8 bytes in big-endian order.
    bool hash(std::uint64_t &value) {
        bool is_negative;
        if (!in_.begins_binary()) return in_.integer(value, is_negative);
        std::string_view bytes;
        if (!in_.binary(bytes) || bytes.size() < 8) return false;
        std::memcpy(&value, bytes.data() + bytes.size() - 8, 8);
        value = __builtin_bswap64(value);
        return true;
    }

    bool optional_number(Number &value) {
        return in_.nil() || in_.unsigned_integer(value.emplace());
    }

    bool optional_text(Text &value) { return in_.nil() || in_.ascii(value.emplace()); }

    bool encoded_array(std::string_view &value, int depth) {
        if (in_.nil()) return true;
        const char *begin = in_.position();
        std::uint64_t number;
        if (!in_.array(number) || !in_.skip_each(number, depth)) return false;
        value = {begin, static_cast<std::size_t>(in_.position() - begin)};
        return true;
    }

    Msgpack in_;
    SentBatch &batch_;
};

}  // namespace pdconn
