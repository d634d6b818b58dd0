/* Steps of CPU ranks: deep_ep/memory/control.py, "To take part in step n".

   Every rank writes two words into its area n mod 2, raises STEP to n, waits for the STEP of all others and reads
   their areas. Unless CALM, any wait may run out, also that for a rank which is only late; who gives up takes no more
   part. It must never read words of another step, or half of them.

   Mutations: FLAG_FIRST, ONE_AREA, NO_NUMBER. */

#ifndef RANKS
#define RANKS 3
#endif
#define STEPS 4
#ifdef ONE_AREA
#define AREA(rank, n) ((rank) * 2)
#else
#define AREA(rank, n) ((rank) * 2 + (n) % 2)
#endif
#ifdef NO_NUMBER
#define HAS_COME(rank, n) (step[rank] > 0)
#else
#define HAS_COME(rank, n) (step[rank] >= n)
#endif

byte step[RANKS];
byte first_word[2 * RANKS];
byte second_word[2 * RANKS];

active [RANKS] proctype rank() {
  byte n = 1;
  byte peer;
  do
  :: n > STEPS -> break
  :: else ->
#ifdef FLAG_FIRST
     step[_pid] = n;
#endif
     first_word[AREA(_pid, n)] = n;
     second_word[AREA(_pid, n)] = n;
#ifndef FLAG_FIRST
     step[_pid] = n;
#endif
     peer = 0;
     do
     :: peer < RANKS ->
        if
        :: HAS_COME(peer, n) -> peer++
#ifndef CALM
        :: !HAS_COME(peer, n) -> goto gives_up
#endif
        fi
     :: else -> break
     od;
     peer = 0;
     do
     :: peer < RANKS ->
        assert(first_word[AREA(peer, n)] == n);
        assert(second_word[AREA(peer, n)] == n);
        peer++
     :: else -> break
     od;
     n++
  od;
gives_up:
  skip
}
