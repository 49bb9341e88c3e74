// Reads msgpack.  Each function reads one value of a kind and returns whether it was there;
// where it returns false, the position is undefined and the caller gives up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace pdconn {

// Elsewhere Python decodes.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "for processors that are little-endian");

class Msgpack {
public:
    Msgpack(const char *data, std::size_t size)
        : at_(reinterpret_cast<const std::uint8_t *>(data)), end_(at_ + size) {}

    bool is_at_end() const { return at_ == end_; }
    std::size_t left() const { return static_cast<std::size_t>(end_ - at_); }
    const char *position() const { return reinterpret_cast<const char *>(at_); }

    bool nil() {
        if (at_ == end_ || *at_ != 0xc0) return false;
        at_++;
        return true;
    }

    bool begins_map() const { return at_ != end_ && ((*at_ & 0xf0) == 0x80 || (*at_ & 0xfe) == 0xde); }

    // The length of an array or of a map, whose elements follow.
    bool array(std::uint64_t &length) { return header(0x90, 0xdc, length); }
    bool map(std::uint64_t &length) { return header(0x80, 0xde, length); }

    bool double_float(double &value) {
        std::uint64_t bits;
        if (at_ == end_ || *at_++ != 0xcb || !big_endian(8, bits)) return false;
        std::memcpy(&value, &bits, sizeof value);
        return true;
    }

    // An integer as 64 bits, of a negative one the two's complement.
    bool integer(std::uint64_t &value, bool &is_negative) {
        if (at_ == end_) return false;
        const std::uint8_t first = *at_++;
        is_negative = false;
        if (first < 0x80) {
            value = first;
        } else if (first >= 0xe0) {
            value = static_cast<std::uint64_t>(std::int64_t{static_cast<std::int8_t>(first)});
            is_negative = true;
        } else if (first >= 0xcc && first <= 0xcf) {
            return big_endian(std::size_t{1} << (first - 0xcc), value);
        } else if (first >= 0xd0 && first <= 0xd3) {
            const std::size_t size = std::size_t{1} << (first - 0xd0);
            if (!big_endian(size, value)) return false;
            is_negative = value >> (8 * size - 1);
            if (is_negative && size < 8) value |= ~std::uint64_t{0} << 8 * size;
        } else {
            return false;
        }
        return true;
    }

    bool unsigned_integer(std::uint64_t &value) {
        bool is_negative;
        return integer(value, is_negative) && !is_negative;
    }

    // A string of ASCII; others are left to who validates UTF-8.
    bool ascii(std::string_view &value) {
        std::size_t size;
        if (!string_size(size) || left() < size) return false;
        value = {position(), size};
        std::uint8_t all = 0;
        for (std::size_t i = 0; i < size; i++) all |= at_[i];
        at_ += size;
        return all < 0x80;
    }

    bool begins_binary() const { return at_ != end_ && *at_ >= 0xc4 && *at_ <= 0xc6; }

    bool binary(std::string_view &value) {
        std::uint64_t size;
        const std::uint8_t first = *at_++;
        if (!big_endian(std::size_t{1} << (first - 0xc4), size) || left() < size) return false;
        value = {position(), static_cast<std::size_t>(size)};
        at_ += size;
        return true;
    }

    // Any value, which holds others at most `depth` deep.
    bool skip(int depth) {
        if (at_ == end_) return false;
        const std::uint8_t first = *at_;
        if (first < 0x80 || first >= 0xe0) return advance(1);
        std::uint64_t length;
        if (first < 0x90 || (first & 0xfe) == 0xde)
            return depth > 0 && map(length) && skip_each(2 * length, depth - 1);
        if (first < 0xa0 || (first & 0xfe) == 0xdc)
            return depth > 0 && array(length) && skip_each(length, depth - 1);
        std::size_t size;
        if (first < 0xc0 || (first >= 0xd9 && first <= 0xdb)) return string_size(size) && advance(size);
        if (begins_binary()) {
            std::string_view ignored;
            return binary(ignored);
        }
        switch (first) {
            case 0xc0: case 0xc2: case 0xc3: return advance(1);
            case 0xcc: case 0xd0: return advance(2);
            case 0xcd: case 0xd1: return advance(3);
            case 0xce: case 0xd2: case 0xca: return advance(5);
            case 0xcf: case 0xd3: case 0xcb: return advance(9);
            default: return false;  // no value of this kind is in these events
        }
    }

    bool skip_each(std::uint64_t number, int depth) {
        if (number > left()) return false;  // each takes a byte or more
        for (; number; number--) {
            // Small integers are most of what is skipped.
            if (at_ != end_ && *at_ < 0x80) at_++;
            else if (!skip(depth)) return false;
        }
        return true;
    }

private:
    bool advance(std::size_t size) {
        if (left() < size) return false;
        at_ += size;
        return true;
    }

    bool big_endian(std::size_t size, std::uint64_t &value) {
        if (left() < size) return false;
        if (size == 8) {
            std::memcpy(&value, at_, 8);
            value = __builtin_bswap64(value);
        } else {
            value = 0;
            for (std::size_t i = 0; i < size; i++) value = value << 8 | at_[i];
        }
        at_ += size;
        return true;
    }

    bool header(std::uint8_t fixed, std::uint8_t sized, std::uint64_t &length) {
        if (at_ == end_) return false;
        const std::uint8_t first = *at_++;
        if ((first & 0xf0) == fixed) {
            length = first & 0x0f;
            return true;
        }
        return (first & 0xfe) == sized && big_endian(first == sized ? 2 : 4, length);
    }

    bool string_size(std::size_t &size) {
        if (at_ == end_) return false;
        const std::uint8_t first = *at_++;
        std::uint64_t length = first & 0x1f;
        if ((first & 0xe0) != 0xa0) {
            if (first < 0xd9 || first > 0xdb) return false;
            if (!big_endian(std::size_t{1} << (first - 0xd9), length)) return false;
        }
        size = static_cast<std::size_t>(length);
        return true;
    }

    const std::uint8_t *at_, *end_;
};

}  // namespace pdconn
